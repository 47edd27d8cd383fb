"""Numbers in sentences: each is in the evidence of its page, or of a page that its paragraph links to.

Tables between markers are generated; sentences are written by hand. So every number in a sentence is looked up in the
tables of its section (of the page, if the section has none) and of the linked pages, and among all final values of
their experiments. A number alone must be in a row whose optimizer the paragraph names. The rest is on a list.
"""

import math
import re
import statistics
from functools import cache
from typing import NamedTuple

import pytest
from evidence import EVIDENCE, ROOT, pages

from cprop_lab.analysis.curves import ended
from cprop_lab.analysis.groups import judged_by
from cprop_lab.analysis.pairs import pairs
from cprop_lab.analysis.spread import as_measured, shown
from cprop_lab.output.tables import Table

RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "step.md", *sorted(RESULTS.rglob("*.md"))]

DEFAULTS = "0.999 1e-8"  # CProp's beta, and the paper's eps
SELECTION = "5,000 150"  # iterations of the runs that select a learning rate; the second on Penn Treebank
QUICK_START = "3.11 2.6 2.15 2019 0.154 0.185"  # versions, the paper's year, and losses that test_readme.py holds

NOT_MEASURED = {
    "README.md": f"{QUICK_START} 12",  # settings, sizes
    # The machine and the networks; what was measured elsewhere, or with code that is not kept.
    "docs/step.md": "2.5 124 256 15 168 26 6e-5 21 1.74 1.45 2.9 2.0 1.7 1.4",
    "docs/results/when-to-use.md": "0.154 0.185",  # losses that test_readme.py holds
    "docs/results/alternatives.md": "27 25",  # c, and what theory says of it
    "docs/results/notes/late-start.md": "101",
    "docs/results/notes/late-start-lstm.md": "101",
    # Read off the curves.
    "docs/results/fmnist-fc.md": "5,000",
    "docs/results/scale-histogram.md": "5,000",
    "docs/results/ptb-lstm.md": f"{SELECTION} 50 800 830",
    # The rules; a first measurement of the seconds; and a comparison of two passes through the LSTM.
    "docs/results/scoreboard-rules.md": (ROOT / "docs/results/scoreboard-rules.md").read_text(),  # nothing measured
    # The network, its batches, the horizon of AdEMAMix, and a difference in standard errors.
    "docs/results/scoreboard.md": "0.8 16 64 35 10,000 2.8 300 100 200 32 0.95 0.999",
    "docs/results/notes/next-rule.md": "400 0.95 1000",  # steps, settings
    "docs/results/notes/scoreboard-1.md": f"{DEFAULTS} {SELECTION} 0.01 32 256 0.0001 0.0009 0.005 20,000",
}
"""By page: settings, sizes and limits, and the few numbers that are not from the committed runs."""


class Number(NamedTuple):
    """A number as it is written."""

    text: str
    deviation: str = ""
    percent: bool = False

    def quotes(self, other: "Number") -> bool:
        """Whether it is the other one, perhaps with fewer digits or as a percentage."""
        if self.deviation and not (other.deviation and rounded(other.deviation, self.deviation)):
            return False
        if self.percent == other.percent:
            return rounded(other.text, self.text)
        ours, theirs = (float(number.text) / (100 if number.percent else 1) for number in (self, other))
        return math.isclose(ours, theirs)


def rounded(exact, text):
    """Whether a text is a number, or the number rounded to no fewer than three digits."""
    if float(exact) == float(text):
        return True
    digits, decimals = len(text.replace(".", "").lstrip("0")), len(text.partition(".")[2])
    return digits >= 3 and f"{float(exact):.{decimals}f}" == text


NUMBER = re.compile(r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?(?:e-\d+)?)(?: ± (\d+(?:\.\d+)?))?( %)?(?!\w|[.,]\d|-\d)")


def numbers(text):
    return [Number(m[1].replace(",", ""), m[2] or "", bool(m[3])) for m in NUMBER.finditer(text)]


class Row(NamedTuple):
    """A row of a table, with the words of its optimizer's name; or a line below it, which says how many seeds."""

    words: set[str]
    numbers: list[Number]
    seeds: int


def row(line):
    words = re.findall(r"\b[A-Z]\w+|averaged|cosine", line) if line.startswith("|") else ()
    seeds = re.search(r"; seeds ([\d, ]+);", line)
    return Row({word.lower() for word in words} - {"cprop"}, numbers(line), len(seeds[1].split(",")) if seeds else 0)


@cache
def ends(name):
    """All final values of an experiment, and the test loss at the plain optimizer's final training loss."""
    experiment = pages.kept(EVIDENCE)[name]
    groups = {}
    for run in experiment.runs:
        groups.setdefault(pages.named(run), []).append(run)
    rows = []
    for label, runs in groups.items():
        values = [ended(runs, column) for column in ("train_loss", "test_loss", judged_by(runs), "mean_scale")]
        near_zero = shown([100 * float(run.histogram()[-1][0]) for run in runs], " %")
        rows.append([label, *values, near_zero])
    for label, pair in pairs(experiment.runs).items():
        rows.append([label, as_measured((ours for _, ours in pair.there("test_loss")), "test_loss")])
    return Table([""], rows).markdown().splitlines()


MEASURED = re.compile(r"<!-- measured: (?:(?:evidence|details) )?([\w -]+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)


def sections(path):
    """The sections of a page, by their anchors."""
    texts = re.split(r"^(?=## )", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.partition("\n")[0]).strip().lower().replace(" ", "-"): text for text in texts}


@cache
def evidence(path, anchor):
    """The rows of a section's evidence; of the whole page's, if the section has none."""
    found = MEASURED.findall(sections(path).get(anchor, "")) or MEASURED.findall(path.read_text())
    lines = [line for _, table in found for line in table.splitlines()]
    names = dict.fromkeys(name for name, _ in found if name in pages.kept(EVIDENCE))
    return [row(line) for line in (*lines, *(line for name in names for line in ends(name)))]


LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
NOT_PROSE = re.compile(
    r"```.*?```|^#.*?$|^>.*?$|^\|[ |-]*$|!\[[^\]]*\]\([^)]*\)|<[^>]*>|`[^`]*`|\$[^$]*\$|\bcommit \w+"
    r"|\b(?:figures?|sections?)\s[\d.]+(?:(?:,|\sand)\s[\d.]+)*",
    flags=re.DOTALL | re.MULTILINE,
)


def paragraphs(path):
    """What was written by hand: paragraphs, list items and rows, each with its evidence."""
    for anchor, section in sections(path).items():
        text = NOT_PROSE.sub("", MEASURED.sub("", section))
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) )", text):
            rows = list(evidence(path, anchor))
            for _, target in LINK.findall(paragraph):
                page, _, place = target.partition("#")
                if page.endswith(".md"):
                    rows += evidence((path.parent / page).resolve(), place)
            yield " ".join(LINK.sub(r"\1", re.sub(r"^\s*\d+\. ", "", paragraph)).split()), rows


def is_founded(number, paragraph, rows):
    named = (row for row in rows if number.deviation or all(word in paragraph.lower() for word in row.words))
    return any(number.quotes(known) for row in named for known in row.numbers)


def checked(path):
    """The numbers of a page that evidence must have; those of one digit are counts."""
    known = numbers(NOT_MEASURED.get(path.relative_to(ROOT).as_posix(), ""))
    for paragraph, rows in paragraphs(path):
        for number in numbers(paragraph):
            if number not in known and not re.fullmatch(r"\d", number.text):
                yield number, paragraph, rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_number_in_a_sentence_is_in_the_evidence(page):
    """To mend it: correct the sentence, or let its paragraph link to the page that has the number."""
    assert [number_and_where[:2] for number_and_where in checked(page) if not is_founded(*number_and_where)] == []


def test_seeds_are_counted():
    count = {"one": 1, "two": 2, "three": 3}
    found = 0
    for page in PAGES:
        for paragraph, rows in paragraphs(page):
            run_with = {row.seeds for row in rows} - {0}
            for said in (
                re.findall(r"(?:[(,;]|with|but) (one|two|three) seeds?\b(?! of)", paragraph) if run_with else ()
            ):
                assert count[said] in run_with, (page.name, paragraph)
                found += 1
    assert found > 10


def test_an_altered_number_is_found():
    """Its last digit is raised by one. Another row of the same paragraph may have that number, but seldom."""
    found = {True: [], False: []}
    for number, *where in (one for page in PAGES for one in checked(page) if "e" not in one[0].text):
        altered = number._replace(text=f"{number.text[:-1]}{(int(number.text[-1]) + 1) % 10}")
        found[bool(number.deviation)].append(not is_founded(altered, *where))
    assert statistics.fmean(found[True]) > 0.98
    assert statistics.fmean(found[False]) > 0.8
    assert min(map(len, found.values())) > 60
