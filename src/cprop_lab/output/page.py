"""One self-contained page on all experiments: what the paper claims, what was measured, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from cprop_lab.analysis import scoreboard
from cprop_lab.analysis.curves import WINDOW, ended
from cprop_lab.analysis.groups import WORDS, by_place, grouped, metric, names, with_status
from cprop_lab.analysis.pairs import Pair, pairs
from cprop_lab.analysis.scoreboard import Entry, scores
from cprop_lab.analysis.spread import NOTHING, shown
from cprop_lab.analysis.verdict import verdict
from cprop_lab.output.drawing import to_svg
from cprop_lab.output.figures import draw
from cprop_lab.run.evaluation import METRICS
from cprop_lab.store import Run, Store, measured

__all__ = ["write"]

Manifest = Mapping[str, Any]

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b6270; --line: #d9dce1; --paper: #fff; --shade: #f4f5f7;
  --link: #0060a8; --mark: #8a4b00; --marked: #fff2dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a0a7b4; --line: #3a3f47; --paper: #17191c;
  --shade: #212428; --link: #7cc0ff; --mark: #ffcf8a; --marked: #3a2c14; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 3.5rem 0 .5rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
a { color: var(--link); }
code, pre { font: .85em/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--shade); padding: .6rem .8rem; border-radius: 6px; overflow-x: auto; margin: .4rem 0; }
blockquote { margin: .8rem 0; padding: .1rem 0 .1rem .9rem; border-left: 3px solid var(--line); }
figure { margin: 1.2rem 0; padding: .6rem; background: #fff; border: 1px solid var(--line); border-radius: 8px;
  overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 38rem; height: auto; margin: 0 auto; }
figure.bars svg { min-width: 0; max-width: 40rem; }
.table { overflow-x: auto; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 0 .3rem 1rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; color: var(--soft); white-space: normal; }
td:last-child { white-space: normal; min-width: 5.5rem; }
.words { text-align: left; }
th:first-child, td:first-child { padding-left: 0; position: sticky; left: 0; background: var(--paper); }
.soft { color: var(--soft); font-size: .875rem; font-weight: normal; margin: .3rem 0; }
.mark { background: var(--marked); color: var(--mark); border-radius: 4px; padding: .1rem .45rem; font-size: .8rem;
  font-weight: 600; white-space: nowrap; }
.missing { background: var(--marked); color: var(--mark); border-radius: 6px; padding: .6rem .9rem; margin: .8rem 0; }
.missing pre { background: none; padding: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .4rem 0; font-size: .875rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); font-size: .875rem; }
"""

READING: Final = (
    "Numbers are means over seeds ± one standard deviation. Final losses and accuracies are averaged over the last "
    f"{WINDOW} evaluations of a run, because single ones are noisy. Seconds are training time, without evaluations."
)
TARGETS: Final = (
    "How long CProp takes to reach the final training loss of the same optimizer without CProp, seed by seed; a ratio "
    f"below 1 means time saved. Both curves are averaged over {WINDOW} evaluations, so the plain optimizer may reach "
    "its target before its last iteration. Seconds are iterations times the median time per step."
)
SURVIVORS: Final = (
    "Where some seeds missed the target, the numbers with CProp are averages over the others, and so flatter CProp."
)


def write(store: Store, path: Path) -> None:
    """Write a page on all experiments of a store, as one file that fetches nothing.

    Args:
        store: holds the experiments.
        path: the file to write.
    """
    experiments = [(name, about, store.runs(about["runs"])) for name, about in store.experiments().items()]
    contents = [_entry(*one) for one in experiments]
    sections = [_section(*one, store.runs(one[1].get("timings", ()))) for one in experiments]
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>CProp: experiments</title>
<style>{STYLE}</style>
</head>
<body>
<h1>CProp: experiments</h1>
<p>{READING}</p>
<nav aria-label="Contents">
{_list(contents) if contents else "<p>No experiment has been run yet: see <code>cprop-lab list</code>.</p>"}
</nav>
{"".join(sections)}</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


# Parts of the page.


def _entry(name: str, about: Manifest, runs: Sequence[Run]) -> str:
    """An entry of the table of contents."""
    missing = len(_unfinished(about, runs))
    state = f' <span class="mark">{missing} of {len(about["runs"])} runs missing</span>' if missing else ""
    return f'<a href="#{_anchor(name)}">{escape(about["title"])}</a> {_reduced(about)}{state}'


def _unfinished(about: Manifest, runs: Sequence[Run]) -> list[str]:
    present = {run.identity for run in runs}
    return [name for name in about["runs"] if name not in present]


def _section(name: str, about: Manifest, runs: Sequence[Run], timings: Sequence[Run]) -> str:
    drawn = [
        _inline(figure, f"{_anchor(name)}{suffix}", about["title"])
        for suffix, figure in draw(about, runs, timings, titled=False).items()
    ]
    entries = scores(about, runs, timings)
    to_target = _scores(entries) if entries else _targets(pairs(runs))
    return f"""
<section id="{_anchor(name)}">
<h2>{escape(about["title"])} {_reduced(about)}</h2>
<blockquote><p>{escape(about["claim"])}</p><p class="soft">The paper, {escape(about["figure"])}</p></blockquote>
{_missing(about, runs)}{"".join(drawn)}{to_target}{_ends(runs)}{_provenance(about, runs)}
</section>
"""


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def _reduced(about: Manifest) -> str:
    """The preset, marked where it is shorter than the paper's."""
    preset = escape(about["preset"])
    if not about["reduced"]:
        return f'<span class="soft">preset {preset}</span>'
    return f'<span class="mark" title="shorter than the paper\'s programme">{preset}: shorter than the paper\'s</span>'


def _missing(about: Manifest, runs: Sequence[Run]) -> str:
    missing = _unfinished(about, runs)
    if not missing:
        return ""
    listed = ", ".join(f"<code>{escape(name)}</code>" for name in missing)
    return f"""<div class="missing" role="note">{len(missing)} of {len(about["runs"])} runs are not finished and are
missing below: {listed}. To finish them:
<pre>{escape(about["command"])}</pre></div>
"""


def _inline(figure: Figure, name: str, title: str) -> str:
    """A figure as part of the page. Ids must be unique on a page, so the figure's name is put before its own."""
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", to_svg(figure))
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2)  # a page knows what svg is
    bars = ' class="bars"' * name.endswith("-times")  # a phone shows these whole; the others scroll
    return f'<figure{bars} role="img" tabindex="0" aria-label="Figure: {escape(title)}">{svg}</figure>\n'


def _scores(entries: Sequence[Entry]) -> str:
    """The scoreboard's table."""
    return f"<h3>Scores</h3>\n{_table(*scoreboard.table(entries))}"


def _targets(pairs: Mapping[str, Pair]) -> str:
    """The table of iterations and seconds to target."""
    if not pairs:
        return ""
    heads = ["", "target loss"]
    for of in ("iterations", "seconds"):
        heads += [f"{of} without", "with CProp", "ratio"]
    rows = [[name, *_to_target(pair)] for name, pair in pairs.items()]
    all_reached = all(math.isfinite(share) for pair in pairs.values() for share in pair.shares("iterations"))
    note = "" if all_reached else f'<p class="soft">{SURVIVORS}</p>\n'
    verdicts = [verdict(name, pair) for name, pair in pairs.items()]
    notes = dict.fromkeys(limit for one in verdicts for limit in one.notes)
    return f"""<h3>Does CProp help?</h3>
{_list(escape(one.headline) for one in verdicts)}{"".join(f'<p class="soft">Note: {escape(n)}</p>' for n in notes)}
<h3>Iterations and seconds to target</h3>
<p class="soft">{TARGETS}</p>
{_table([*heads, "seeds that reached it"], rows)}{note}"""


def _to_target(pair: Pair) -> list[str]:
    shares = pair.shares("iterations")
    if not shares:
        return ["did not learn without CProp", *[NOTHING] * 7]
    cells = [shown(pair.targets)]
    for of in ("iterations", "seconds"):
        times = pair.times(of)
        cells.append(shown([without for without, _ in times]))
        cells += [shown(values, nothing="not reached") for values in ([ours for _, ours in times], pair.shares(of))]
    others = len(pair.plain) - len(shares)
    reached = sum(map(math.isfinite, shares))
    cells.append(f"{reached} of {len(shares)}" + f" ({others} did not learn without CProp)" * bool(others))
    return cells


def _ends(runs: Sequence[Run]) -> str:
    """The table of final losses and metrics."""
    groups = grouped(runs)
    if not groups:
        return ""
    named = names(groups, but=("lr",))
    places = by_place(groups)
    several = len(places) > 1
    metrics = [column for column in METRICS if measured(runs, column)]
    heads = ["optimizer", "learning rate", "seeds", WORDS["train_loss"], WORDS["test_loss"]]
    heads += [*[" or ".join(WORDS[column] for column in metrics)] * bool(metrics), "ms per step"]
    rows = [
        [*[where] * several, named[group], f"{group.lr:g}", *_end(groups[group], bool(metrics))]
        for where, members in places.items()
        for group in members
    ]
    table = _table(["workload"] * several + heads, rows, words=1 + several)
    return f"<h3>Final values</h3>\n{table}"


def _end(runs: Sequence[Run], with_metric: bool) -> list[str]:
    """The cells of a group of runs; diverged runs are counted, and left out of the means."""
    diverged = len(with_status(runs, "diverged"))
    return [
        f"{len(runs)}" + f" ({diverged} diverged)" * bool(diverged),
        ended(runs, "train_loss"),
        ended(runs, "test_loss", NOTHING),
        *[ended(runs, metric(runs), NOTHING)] * with_metric,
        shown([1000 * run.column("seconds")[-1] / run.column("step")[-1] for run in runs if run.column("step")[-1]]),
    ]


def _provenance(about: Manifest, runs: Sequence[Run]) -> str:
    """How an experiment was made."""

    def made(*keys: str) -> str:
        """The distinct values that the runs have there."""
        found = (" ".join(str(run.made.get(key, "")) for key in keys).strip() for run in runs)
        return ", ".join(sorted(set(filter(None, found)))) or NOTHING

    dates = sorted(str(run.made["finished"]) for run in runs if "finished" in run.made)
    facts = {
        "preset": about["preset"] + " (shorter than the paper's)" * bool(about["reduced"]),
        "learning rates": ", ".join(f"{name}: {lr:g}" for name, lr in about["learning_rates"].items()) or NOTHING,
        "seeds": ", ".join(map(str, sorted({run.specification.seed for run in runs}))) or NOTHING,
        "commit": made("commit"),
        "cprop": made("cprop"),
        "torch": made("torch"),
        "python": made("python"),
        "device": made("device", "machine"),
        "threads per run": made("threads"),
        "finished": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NOTHING,
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>\n" for name, text in facts.items())
    return f"""<h3>How it was made</h3>
<pre>{escape(about["command"])}</pre>
<dl>
{listed}</dl>
{_details(runs)}"""


def _details(runs: Sequence[Run]) -> str:
    """Every run and its settings, folded away."""
    if not runs:
        return ""
    fields = list(runs[0].specification.to_dict())
    rows = [
        [run.identity, run.status, *(_setting(run.specification.to_dict()[name]) for name in fields)] for run in runs
    ]
    heads = ["run", "ended", *(name.replace("_", " ") for name in fields)]
    table = _table(heads, rows, words=len(heads))
    return f"<details><summary>All {len(runs)} runs and their settings</summary>\n{table}</details>"


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(inner)}" for name, inner in value.items()) or NOTHING
    return f"{value:g}" if isinstance(value, float) else str(value)


# HTML.


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table that scrolls on its own where the page is narrow.

    Args:
        heads: of the columns.
        rows: cells as text.
        words: how many of the first columns hold words, aligned left; numbers are aligned right.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        opened = [f'{tag} class="words"' if i < words else tag for i in range(len(cells))]
        return "<tr>" + "".join(f"<{o}>{escape(cell)}</{tag}>" for o, cell in zip(opened, cells, strict=True)) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    # With a tab stop, so that it can be scrolled by keyboard.
    return f"""<div class="table" tabindex="0"><table>
<thead>{row(heads, "th")}</thead>
<tbody>
{body}
</tbody>
</table></div>
"""


def _list(items: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"
