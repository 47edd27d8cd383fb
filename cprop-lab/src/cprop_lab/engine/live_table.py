"""The progress of a command on the terminal: the phase, a bar, and the runs under way."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cprop_lab.engine.progress import Progress
from cprop_lab.run.evaluation import Evaluation
from cprop_lab.run.names import FLAGS
from cprop_lab.run.specification import Specification

__all__ = ["LiveTable"]


class LiveTable(Progress):
    """One bar for the whole command, its present phase, and a table of the runs under way.

    On a terminal it is redrawn in place; a log gets one line per finished run. The bar counts iterations, because runs
    differ in length.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.live: Live | None = None
        self.title, self.later, self.what = "running", 0, ""
        self.rows: dict[Specification, Evaluation] = {}
        self.first: dict[Specification, int] = {}
        self.said: set[str] = set()
        # Iterations: of runs that have ended, of the others of the present set, and how many were worked off here.
        self.past, self.present, self.worked = 0, 0, 0
        self.runs, self.runs_ended = 0, 0
        self.began: float | None = None
        self.reported: float | None = None
        self.since = time.monotonic()

    # How far it is.

    @property
    def done(self) -> int:
        """Iterations so far."""
        return self.past + sum(int(row["step"]) for row in list(self.rows.values()))

    @property
    def share(self) -> float:
        """The fraction of the command that is done, by the present estimate of its length."""
        total = self.past + self.present + self.later
        return self.done / total if total else 1.0

    def left(self) -> str:
        """The time left, judged by the pace since the first run reported; empty as long as that is unknown."""
        rows = list(self.rows.items())  # as it is drawn by a thread, while runs come and go
        worked = self.worked + sum(row["step"] - self.first.get(run, row["step"]) for run, row in rows)
        remaining = self.past + self.present + self.later - self.done
        if self.reported is None or not worked or not remaining:
            return ""
        seconds = (time.monotonic() - self.reported) / worked * remaining
        if seconds < 60:
            return "less than a minute left"
        return f"about {math.ceil(seconds / 60)} min left" if seconds < 7200 else f"about {seconds / 3600:.0f} h left"

    # What is told.

    def phase(self, title: str, later: int = 0) -> None:
        """Name the next set of runs."""
        self.title, self.later = title, later

    def begin(self, missing: Sequence[Specification], reused: int) -> None:
        """Show the bar, and no runs yet."""
        self.rows.clear()
        self.runs, self.runs_ended = len(missing), 0
        self.present = sum(specification.iterations for specification in missing)
        self.began = self.began or time.monotonic()
        if reused:
            self.say(f"{self.title}: {reused} of {reused + len(missing)} runs are already finished and are reused")
        elif not self.console.is_terminal:
            self.say(f"{self.title}: {len(missing)} run{'s' * (len(missing) != 1)}")
        self.waiting()
        if missing and self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=2, transient=True, get_renderable=self.render)
            self.live.start(refresh=True)

    def waiting(self, what: str = "") -> None:
        """Show what the command is waiting for, with a clock; no run is under way then."""
        for specification in list(self.rows) if what else ():
            self._off(specification)
        if what and self.live is None and what not in self.said:
            self.say(what)
            self.said.add(what)
        self.what, self.since = what or "starting the runs and reading their data", time.monotonic()

    def evaluated(self, specification: Specification, evaluation: Evaluation) -> None:
        """Show how far a run is; with the step at which it began, if rows before this one were left out."""
        self.first.setdefault(specification, evaluation["began" if "began" in evaluation else "step"])
        self.reported = self.reported or time.monotonic()
        self.rows[specification] = evaluation

    def ended(self, specification: Specification) -> None:
        """Count a run, and take it off the table."""
        row = self._off(specification)
        self.past += specification.iterations
        self.present -= specification.iterations
        self.runs_ended += 1
        self.what, self.since = "finishing" if self.runs_ended == self.runs else self.what, time.monotonic()
        if self.live is None and row is not None:
            far = ", ".join(filter(None, [f"{self.share:.0%}".replace("%", " %"), self.left()]))
            self.say(f"[{far}] {described(specification)}: training loss {row['train_loss']:.4f}")

    def failed(self, specification: Specification, error: str) -> None:
        """Say what went wrong."""
        self._off(specification)
        self.say(f"{described(specification)} failed: {error}", style="red")

    def _off(self, specification: Specification) -> Evaluation | None:
        row = self.rows.pop(specification, None)
        if row is not None:
            self.worked += row["step"] - self.first.pop(specification)
        return row

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    # What is seen.

    def render(self) -> Group:
        """The phase, the bar and the table: in this order, because a terminal with few lines cuts off the last ones."""
        now = time.monotonic()
        phase = f"{self.title}: {self.runs_ended} of {self.runs} runs finished"
        far = [f"{self.share:.0%}".replace("%", " %"), f"{clock(now - (self.began or now))} elapsed", self.left()]
        facts = ", ".join(filter(None, far))
        bar = Table.grid(padding=(0, 1))
        room = min(40, self.console.width - len(facts) - 2)
        bar.add_row(ProgressBar(total=1.0, completed=self.share, width=max(room, 8)), facts)
        running = self.table() if self.rows else Text(f"{self.what} ({clock(now - self.since)})")
        return Group(Text(phase), bar, running)

    def table(self) -> Table:
        """The runs under way."""
        table = Table("workload", "optimizer", "lr", "seed", "iterations", "training loss", "ms per step", box=None)
        for specification, row in list(self.rows.items()):
            timed = row["step"] and row["seconds"]
            table.add_row(
                specification.workload_label,
                specification.label,
                f"{specification.lr:g}",
                str(specification.seed),
                f"{row['step']:,} of {specification.iterations:,}",
                f"{row['train_loss']:.4f}",
                f"{1000 * row['seconds'] / row['step']:.2f}" if timed else first_step(specification),
            )
        return table


def described(specification: Specification) -> str:
    """A run, in a line of a log."""
    return f"{specification.workload_label} {specification.label} lr {specification.lr:g} seed {specification.seed}"


def first_step(specification: Specification) -> str:
    """What a run does before its steps can be timed: the first one compiles CProp's kernels."""
    settings = specification.resolved_settings()
    fused = specification.optimizer_name.cprop and any(settings.get(flag) for flag in FLAGS)
    return "compiling" if fused else "starting"


def clock(seconds: float) -> str:
    """A time as a clock shows it.

    Example:
        >>> clock(7), clock(754.3), clock(3 * 3600 + 62)
        ('0:07', '12:34', '3:01:02')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
