"""Does CProp help? A verdict in plain words: by how much, how sure that is, and what limits it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cprop_lab.analysis.curves import ended, final_loss
from cprop_lab.analysis.groups import WORDS, judged_by
from cprop_lab.analysis.pairs import Pair
from cprop_lab.analysis.spread import Ratio, as_measured, ratio, shown
from cprop_lab.store import Run

__all__ = ["Verdict", "verdict"]

DIGITS: Final = 3
"""Significant digits of a verdict's numbers."""
ENOUGH_SEEDS: Final = 3
HELPS: Final = "helps"
NO_HELP: Final = "does not help"
UNCLEAR: Final = "makes no clear difference"
MIXED: Final = "has mixed results"
NEAR: Final = 0.01
"""Of the target: who misses it by no more has come close."""
NAMED: Final = 6
"""Seeds that a sentence names."""
SAME: Final = 0.0005
"""A change smaller than this is none."""


@dataclass(frozen=True)
class Verdict:
    """Whether CProp helps, in words: the same on a terminal and on the report's page.

    Args:
        headline: the result, in a sentence.
        headings: of a small table.
        rows: of the table: what it takes to reach the target, and where both runs end.
        notes: what limits the result.
    """

    headline: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def verdict(name: str, pair: Pair) -> Verdict:
    """Whether CProp helps, by how much, and how sure that is.

    The target is the plain optimizer's final training loss. Intervals are 95 % intervals of the mean ratio over seeds,
    on a log scale.

    Args:
        name: of the optimizer with CProp, as tables have it.
        pair: its runs without and with CProp.
    """
    return Verdict(
        _headline(re.sub(r"CProp\(([^)]*)\)", r"\1 + CProp", name), pair),
        ["", *(runs[0].specification.label for runs in (pair.plain, pair.scaled)), "change"],
        _rows(pair),
        _notes(pair),
    )


def _target(pair: Pair) -> str:
    """Whose final loss is to be reached."""
    plain = pair.plain[0].specification.label
    return f"{'the baseline' if ',' in plain else plain}'s final"


def _headline(name: str, pair: Pair) -> str:
    target, shares = f"{_target(pair)} training loss", pair.shares("iterations")
    seeds = _counted(len(shares), "seed")
    if not shares:
        baseline = pair.plain[0].specification
        return (
            f"{name}: nothing to compare with, because {baseline.label} did not learn at learning rate {baseline.lr:g}."
        )
    reached = sum(map(math.isfinite, shares))
    if reached < len(shares):
        judgement = UNCLEAR if _near(pair) else MIXED if reached else NO_HELP
        how = f"{_number(reached)} of {seeds} reach{'es' * (reached == 1)} {target}"
        return f"{name} {judgement}: {how if reached else f'it never reaches {target} ({seeds})'}. {_missed(pair)}"
    iterations, seconds = ratio([max(share, SAME) for share in shares]), _ratio(pair, "seconds")
    judgement, interval = _judged(iterations), _interval(iterations, "iterations")
    saved = _said(iterations.mean, "iterations", " iterations")
    certainty = f"95 % interval {interval}, {seeds}" if interval else seeds
    of_time = _judged(seconds) if seconds else judgement
    if judgement in (HELPS, UNCLEAR) and of_time != judgement:
        judgement += " in iterations" + ", costs time" * (of_time == NO_HELP and judgement == HELPS)
    time = ""
    if seconds and of_time != UNCLEAR:
        time = f" {'but' if iterations.mean < 1 < seconds.mean else 'and'} {_change(seconds, 'time', ' time')}"
    elif seconds and _judged(iterations) != UNCLEAR:
        time = ", with no clear difference in time"
    return f"{name} {judgement}: it reaches {target} in {saved} ({certainty}){time}."


def _missing(pair: Pair) -> list[tuple[Run, float]]:
    """The runs with CProp that did not reach the target, and the target."""
    shares = zip(pair.learned, pair.shares("iterations"), strict=True)
    return [(scaled, target) for (_, scaled, target), share in shares if math.isinf(share)]


def _above(run: Run, target: float) -> float:
    """How far above its target a run ended, as a fraction of the target; infinite if it diverged or that is zero."""
    above = final_loss(run) - target
    return above / abs(target) if target else math.inf


def _near(pair: Pair) -> bool:
    """Whether all that missed the target came close."""
    return all(_above(run, target) <= NEAR for run, target in _missing(pair))


def _missed(pair: Pair) -> str:
    """Which seeds did not reach the target, and by how much they missed it."""
    missing = _missing(pair)
    ended = [(run, target) for run, target in missing if run.status == "finished"]
    said = []
    if diverged := [run for run, _ in missing if run.status != "finished"]:
        said.append(f"{_seeds(diverged)} diverged.")
    if ended:
        gaps = sorted(_above(run, target) for run, target in ended)
        low, high = (_percent(gaps[i]) for i in (0, -1))
        far = high if low == high else f"{low} to {high}"
        digits = DIGITS + _near(pair)
        losses = shown([final_loss(run) for run, _ in ended], digits=digits)
        targets = shown([target for _, target in ended], digits=digits)
        ends = "ends" if len(ended) == 1 else "end"
        said.append(
            f"{_seeds([run for run, _ in ended])} {ends} {far} above it: final loss {losses}, target {targets}."
        )
    return " ".join(said)


def _percent(part: float) -> str:
    """A part in percent, to two digits."""
    if math.isinf(part):
        return "far"
    return f"{float(f'{100 * part:.2g}'):,g} %" if part >= 1e-4 else "less than 0.01 %"


def _seeds(runs: Sequence[Run]) -> str:
    """The seeds of some runs; of many, the first."""
    seeds = [str(run.specification.seed) for run in runs]
    if len(seeds) == 1:
        return f"Seed {seeds[0]}"
    last = seeds[-1] if len(seeds) <= NAMED else f"{len(seeds) - NAMED + 1} more"
    return f"Seeds {', '.join(seeds[: min(len(seeds), NAMED) - 1])} and {last}"


def _ratio(pair: Pair, of: str) -> Ratio | None:
    """Iterations or seconds with CProp divided by those without; None if they cannot be compared for every seed."""
    shares = pair.shares(of)
    return ratio(shares) if pair.comparable(of) and shares and all(0 < share < math.inf for share in shares) else None


def _judged(of: Ratio) -> str:
    """What the interval of a ratio allows to say."""
    if math.isinf(of.high):  # one seed
        return "may help" if of.mean < 1 - SAME else "does not seem to help"
    return HELPS if of.high < 1 else NO_HELP if of.low > 1 else UNCLEAR


def _change(of: Ratio, what: str, noun: str = "") -> str:
    """A ratio in words, with its interval."""
    interval = _interval(of, what)
    return _said(of.mean, what, noun) + f" ({interval})" * bool(interval)


def _interval(of: Ratio, what: str) -> str:
    """Its ends in words, briefer where they lie on the mean's side; nothing with one seed, or if all are alike."""
    low, mean, high = (_said(value, what).partition(" ") for value in (of.low, of.mean, of.high))
    if math.isinf(of.high) or low == mean == high == _said(1, what).partition(" "):
        return ""
    if low[2] == mean[2] == high[2]:
        return " to ".join(sorted((low[0], high[0]), key=float)) + f" {mean[2].split()[0]}"
    return f"{''.join(low)} to {''.join(high)}"


def _said(value: float, what: str, noun: str = "") -> str:
    """How many times as many iterations, or as much time; in percent where that is easier to grasp."""
    less, much = ("fewer", "many") if what == "iterations" else ("less", "much")
    percent = min(100 * abs(1 - value), 99.9 if value < 1 else math.inf)
    if abs(value - 1) < SAME:
        return f"as {much}{noun}"
    if value >= 2:
        return f"{float(f'{value:.{DIGITS}g}'):,g} times as {much}{noun}"
    return f"{percent:.{0 if 1 <= percent <= 99 else 1}f} % {less if value < 1 else 'more'}{noun}"


def _rows(pair: Pair) -> list[list[str]]:
    """What it takes to reach the target, and where both runs end: training further may also be overfitting."""
    column = judged_by(pair.plain)
    rows = [_to_target(pair, of) for of in ("iterations", "seconds") if pair.learned]
    for name in dict.fromkeys(("train_loss", column)):
        ends = (ended(runs, name, digits=DIGITS) for runs in (pair.plain, pair.scaled))
        rows.append([f"final {WORDS[name]}", *ends, ""])
    there = pair.there(column)
    if there and len(there) == len(pair.learned):  # else the seeds that got there would flatter CProp
        at_target = (as_measured(values, column, digits=DIGITS) for values in zip(*there, strict=True))
        rows.append([f"{WORDS[column]} at that loss", *at_target, ""])
    return rows


def _to_target(pair: Pair, of: str) -> list[str]:
    times, found = pair.times(of), _ratio(pair, of)
    plain, scaled = (shown(values, nothing="not reached", digits=DIGITS) for values in zip(*times, strict=True))
    reached = sum(math.isfinite(ours) for _, ours in times)
    some = f" (reached by {reached} of {len(times)})" if 0 < reached < len(times) else ""
    change = _change(found, "time" if of == "seconds" else of) if found else ""
    return [f"{of} to that loss", plain, scaled + some, change]


def _notes(pair: Pair) -> list[str]:
    """What limits the result."""
    specification, learned = pair.scaled[0].specification, len(pair.learned)
    notes = []
    if left_out := len(pair.plain) - learned:
        notes.append(f"{_counted(left_out, 'seed')} left out: the run without CProp did not learn.")
    if 0 < learned < ENOUGH_SEEDS:
        tell = "cannot" if learned == 1 else "can hardly"
        notes.append(
            f"{_counted(learned, 'seed')} {tell} tell a difference from chance; use at least three (--seeds 3)."
        )
    if why := pair.why_not_timed:
        notes.append(f"no verdict on time: of the runs without and with CProp, {why}. Time them on one idle machine.")
    horizon = 1 / (1 - specification.knobs["cprop_beta"])
    if specification.iterations < horizon:
        notes.append(
            f"Runs of {specification.iterations:,} iterations are shorter than CProp's horizon of 1/(1 - beta) = "
            f"{horizon:,.0f} steps, so its averages have not settled; train for longer."
        )
    return [f"{note[0].upper()}{note[1:]}" for note in notes]


NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _number(n: int) -> str:
    return NUMBERS[n] if n < len(NUMBERS) else f"{n}"


def _counted(n: int, noun: str) -> str:
    return f"{_number(n)} {noun}" + "s" * (n != 1)
