"""Mathematics as MathML, converted when the site is built: nothing is loaded from elsewhere to show a formula."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from docutils import nodes
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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
