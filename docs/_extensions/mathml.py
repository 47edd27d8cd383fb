"""Mathematics as MathML, converted when the site is built: nothing is loaded from elsewhere to show a formula.

Brackets and roots that grow take a font with a table for mathematics, which not every reader has. So the site brings
one: the part that formulas use of STIX Two Math, which comes with ziamath.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from pathlib import Path
from typing import Any

from docutils import nodes
from fontTools import subset
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

# Browsers draw letters as given and know no other style of them than upright.
SCRIPT = re.compile(r'<mi mathvariant="script">([A-Z])</mi>')


def script(letter: str) -> str:
    """A capital as a script letter; Unicode has some of them under an older name."""
    try:
        return unicodedata.lookup(f"MATHEMATICAL SCRIPT CAPITAL {letter}")
    except KeyError:
        return unicodedata.lookup(f"SCRIPT CAPITAL {letter}")


def mathml(latex: str, display: str) -> str:
    """A formula as MathML."""
    latex = latex.strip()
    if r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    latex = latex.replace("{aligned}", "{align*}")
    return SCRIPT.sub(lambda found: f"<mi>{script(found[1])}</mi>", convert(latex, display=display))


def visit(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula; one that cannot be converted is a warning, and so an error of the build."""
    block = isinstance(node, nodes.math_block)
    tag, display = ("div", "block") if block else ("span", "inline")
    try:
        formula = mathml(node.astext(), display)
    except Exception as error:
        logger.warning("cannot convert the formula %r: %s", node.astext(), error, location=node)
        formula = translator.encode(node.astext())
    translator.body.append(translator.starttag(node, tag, "", CLASS="math notranslate") + formula + f"</{tag}>")
    raise nodes.SkipNode


CHARACTERS = [
    *range(0x20, 0x7F),
    *range(0xA0, 0x100),
    *range(0x391, 0x3F6),  # Greek
    *range(0x2010, 0x2058),  # dashes, primes
    *range(0x2100, 0x2150),  # letters that Unicode has outside the blocks below
    *range(0x2190, 0x2200),  # arrows
    *range(0x2200, 0x2300),  # operators
    *range(0x1D434, 0x1D468),  # italic
    *range(0x1D49C, 0x1D4B6),  # script capitals
    *range(0x1D6E2, 0x1D71C),  # italic Greek
]


def add_font(app: Sphinx, exception: Exception | None) -> None:
    """Put the font beside the style sheets."""
    package = importlib.util.find_spec("ziamath")
    if exception or app.builder.format != "html" or package is None or package.origin is None:
        return
    subset.log.setLevel("WARNING")  # it lists every letter
    options = subset.Options(flavor="woff", layout_features=["ssty"])
    font = subset.load_font(str(Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=CHARACTERS)
    subsetter.subset(font)
    subset.save_font(font, str(Path(app.outdir) / "_static" / "math.woff"), options)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
    app.connect("build-finished", add_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
