"""The documentation site: ``sphinx-build -W --keep-going -n docs docs/_build``.

Nothing is fetched, neither by the build nor by a reader's browser: formulas are MathML, fonts are the system's, and
names of other projects are not looked up on their sites.
"""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx_gallery.directives import imgsgnode

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_extensions"), str(DOCS / "figures")]

import draw  # noqa: E402

import cprop  # noqa: E402

project = "CProp"
author = copyright = "The CProp developers, MIT licence"  # noqa: A001
release = version = cprop.__version__

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "gallery", "drawn"]

html_theme = "furo"
html_title = f"CProp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#005a8d", "color-brand-content": "#005a8d"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what an argument is; signatures show names and defaults
# Two callbacks and a container derive from them, and importing takes long.
autodoc_mock_imports = ["lightning", "timm", "torchtitan", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"torch(\..*)?"),  # torch's names, as its site is not asked
    (r"py:.*", r"CPropAround"),  # exists for type checkers only
]

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "looks.ReadingOrder",
    "abort_on_example_error": True,
    "capture_repr": (),
    "download_all_examples": False,
    "image_scrapers": ("matplotlib", "looks.scrape_plain_figures"),
    "reset_modules": ("looks.reset",),
    "show_memory": False,
    "thumbnail_size": (900, 330),  # about a figure's own shape: the style sheet shows its left part
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 10_000,
}


def keep_numbers_whole(app: Sphinx, page: nodes.document, name: str) -> None:
    """No line breaks within "0.52 ± 0.02 %", or "c = 3" in a table: browsers break narrow columns at every space."""
    cells = {text for cell in page.findall(nodes.entry) for text in map(id, cell.findall(nodes.Text))}
    for text in list(page.findall(nodes.Text)):
        whole = text.replace(" ± ", "\xa0±\xa0").replace(" %", "\xa0%")
        if id(text) in cells:
            whole = whole.replace(" = ", "\xa0=\xa0")
        if whole != text:
            text.parent.replace(text, nodes.Text(whole))


def let_figures_scroll(app: Sphinx, page: nodes.document, name: str) -> None:
    """The gallery's figures, which stand in no paragraph, get a box that can scroll."""
    for figure in list(page.findall(imgsgnode)):
        box = nodes.container(classes=["scroll"])
        figure.replace_self(box)
        box += figure


def setup(app: Sphinx) -> None:
    """Draw the figures of the pages before anything reads the pages."""
    app.connect("builder-inited", lambda _: draw.everything(DOCS / "drawn"))
    app.connect("doctree-resolved", keep_numbers_whole)
    app.connect("doctree-resolved", let_figures_scroll)
