"""What the pages call a file, a folder or a command is one: for those who work on CProp, a stale name is a dead end."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from cprop_lab.cli import app

ROOT = Path(__file__).parents[1]
TREE = ("CONTRIBUTING.md", "docs/internals.md", "README.md")  # pages that name files
OTHERS = ("site", "build", "dist")  # folders that a build leaves


def files():
    """The project's files, relative to its root; not what starts with a dot, other than the CI's."""
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if parts[0] not in OTHERS and not any(part.startswith((".", "_build")) for part in parts if part != ".ci"):
            yield "/".join(parts) + "/" * path.is_dir()


FILES = sorted(files())


def exists(name, folder=""):
    """Whether a file or folder has this name, or ends with it; in a folder, if one is given."""
    return any(f"/{path}".endswith(f"/{name}") and f"/{folder}" in f"/{path}" for path in FILES)


NAME = re.compile(r"(?:[\w.-]+/)*[\w.-]+(?:\.(?:py|md|toml|yml|sh|cff|html|json)|/)")


def named(page):
    """The files and folders of a page, each with the folder that the row of a table is about."""
    text = (ROOT / page).read_text()
    for line in text.splitlines():
        spans = [span for span in re.findall(r"`([^`]+)`", line) if NAME.fullmatch(span)]
        about = spans[0] if line.startswith("| `") and spans and spans[0].endswith("/") else ""
        yield from ((span, "" if span == about or "/" in span else about) for span in spans)
    for block in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL):
        yield from ((name, "") for name in NAME.findall(block))


@pytest.mark.parametrize("page", TREE)
def test_files_and_folders_that_a_page_names_are_there(page):
    assert [(name, folder) for name, folder in named(page) if not exists(name, folder)] == []


def test_a_page_names_files_and_one_that_is_not_there_is_found():
    assert all(len(list(named(page))) > 40 for page in TREE[:2])
    assert exists("moments.py", "cprop/")
    assert not exists("moments.py", "cprop_lab/")
    assert not exists("oments.py")


@pytest.mark.parametrize("page", TREE[:2])
def test_every_module_of_the_library_is_on_the_page(page):
    text = (ROOT / page).read_text()
    modules = [path.removeprefix("src/cprop/") for path in FILES if re.fullmatch(r"src/cprop/[a-z]\w*(\.py|/)", path)]
    assert len(modules) > 10
    assert [name for name in modules if not re.search(rf"(?<![\w/]){re.escape(name)}", text)] == []


def order():
    """The library's modules and folders as CONTRIBUTING.md orders them: what imports is before what it imports."""
    (said,) = re.findall(r"Imports go one way: ([^.]+)\.", (ROOT / "CONTRIBUTING.md").read_text())
    return [re.findall(r"`(\w+)`", stage) for stage in said.split("→")]


def test_imports_go_the_way_that_the_page_says():
    stage = {name: number for number, names in enumerate(order()) for name in names}
    seen = set()
    for path in (ROOT / "src" / "cprop").rglob("*.py"):
        ours = path.relative_to(ROOT / "src" / "cprop").parts[0].removesuffix(".py")
        for theirs in re.findall(r"(?m)^\s*from cprop(?:\.(\w+)\S*)? import (\w+)", path.read_text()):
            found = next((name for name in theirs if name in stage), None)
            if ours in stage and found:
                assert ours == found or stage[ours] < stage[found], (ours, found)
                seen |= {ours, found}
    assert seen == set(stage)


def commands():
    """Every line of a code block, and every code span, with its page."""
    for page in (path for path in FILES if path.endswith(".md")):
        text = (ROOT / page).read_text()
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            yield from ((page, line.partition(" #")[0]) for line in block.splitlines())
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        yield from ((page, " ".join(span.split())) for span in re.findall(r"`([^`]+)`", prose))


def matches(pattern):
    found = [(page, match[1]) for page, line in commands() for match in re.finditer(pattern, line)]
    assert found, pattern
    return found


def test_modules_that_are_run_are_there():
    def known(module):
        path = module.replace(".", "/")
        return (
            module.partition(".")[0] in sys.stdlib_module_names or exists(f"{path}.py") or exists(f"{path}/__main__.py")
        )

    assert [found for found in matches(r"python3? -m ([\w.]+)") if not known(found[1])] == []


def test_stages_of_ci_are_there():
    stages = set(re.findall(r"(?m)^(\w+)\(\) \{", (ROOT / ".ci" / "run").read_text()))
    assert [found for found in matches(r"\.ci/run ([a-z]+)") if found[1] not in stages] == []


def test_commands_of_the_laboratory_are_there():
    known = typer.main.get_command(app).commands
    assert [found for found in matches(r"\bcprop-lab ([a-z]+)") if found[1] not in known] == []


def test_extras_and_folders_that_are_installed_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    local = [(page, target) for page, line in commands() if "pip install" in line for target in shlex.split(line)]
    wanted = [(page, extra) for page, target in local for extra in re.findall(r"^\.\[([\w,]+)\]$", target)]
    assert wanted
    assert [(page, extra) for page, names in wanted for extra in names.split(",") if extra not in extras] == []
    assert [
        (page, folder)
        for page, folder in local
        if folder.startswith("./") and not (ROOT / folder.partition("[")[0]).is_dir()
    ] == []
