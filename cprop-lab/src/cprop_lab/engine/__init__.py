"""Many runs: on Ray or in this process, with checkpoints, retries and progress."""


class SweepInterruptedError(Exception):
    """The user stopped it; the same command continues."""


class RunsFailedError(RuntimeError):
    """Some runs failed for good; the others are finished."""


class ResultsLostError(RuntimeError):
    """Runs ended, and their results are nowhere to be found."""
