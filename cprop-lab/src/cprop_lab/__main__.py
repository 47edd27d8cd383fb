"""``python -m cprop_lab`` is ``cprop-lab``."""


def main() -> None:
    """The command line, or what to install for it."""
    try:
        from cprop_lab.cli import app
    except ImportError as error:
        raise SystemExit(
            f"cprop-lab needs more than the library ({error}): run pip install '.[lab]' in a checkout"
        ) from None
    app(prog_name="cprop-lab")


if __name__ == "__main__":
    main()
