"""``python -m cprop_lab`` is ``cprop-lab``."""

from cprop_lab.cli import app

app(prog_name="cprop-lab")
