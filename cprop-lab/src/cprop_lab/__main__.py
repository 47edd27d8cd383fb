"""``python -m cprop_lab`` is ``cprop-lab``."""

from cprop_lab.cli import app


def main() -> None:
    """The command line."""
    app(prog_name="cprop-lab")


if __name__ == "__main__":
    main()
