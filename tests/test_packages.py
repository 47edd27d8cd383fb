"""The distributions and the folders beside them: who may import what of whom."""

import ast
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import cprop

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "cprop": ROOT / "src" / "cprop",
    "cprop_lab": ROOT / "cprop-lab" / "src" / "cprop_lab",
    "cprop_optax": ROOT / "cprop-optax" / "src" / "cprop_optax",
    "evidence": ROOT / "evidence",
    "research": ROOT / "research",
    "studies": ROOT / "studies",
}
BELOW = {
    "cprop": set(),
    "cprop_optax": set(),
    "cprop_lab": {"cprop"},
    "research": {"cprop", "cprop_lab"},
    "studies": {"cprop", "cprop_lab"},
    "evidence": {"cprop", "cprop_lab", "research", "studies"},
}


def files(package):
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        if "tests" not in path.parts:
            parts = path.relative_to(folder).with_suffix("").parts
            yield path, ".".join([package, *(part for part in parts if part != "__init__")])


MODULES = {name: path for package in PACKAGES for path, name in files(package)}


def imports(path):
    """The names a file imports from where, also inside functions; and those that it takes from `import cprop`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cprop":
            yield "cprop", node.attr


def public(module):
    """What a module makes public: what it lists, and the modules in it."""
    names = {other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == module}
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names |= set(ast.literal_eval(node.value))
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_those_below_it_and_only_their_public_names(package):
    wrong = []
    for path, _ in files(package):
        for module, name in imports(path):
            top = module.partition(".")[0]
            if top not in PACKAGES or top == package:
                continue
            told = f"{path.relative_to(ROOT)} imports {name} from {module}"
            inner = package == "cprop_lab" and module != "cprop"  # of the library, what `import cprop` gives
            if top not in BELOW[package] or inner or (name and name not in (*public(module), "__version__")):
                wrong.append(told)
    assert not wrong, "\n".join(wrong)


def test_what_the_library_makes_public_is_there():
    assert {name for name in cprop.__all__ if not hasattr(cprop, name)} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_no_circles(package):
    """Among what modules import as they are imported themselves; what a function imports comes later."""
    graph = {}
    for path, name in files(package):
        found = graph.setdefault(name, set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(other if other in MODULES else node.module for other in whole)
        found -= {name}
    TopologicalSorter({name: found & graph.keys() for name, found in graph.items()}).prepare()


def test_the_wheel_of_the_library_has_the_library_alone(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = hatchling.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"cprop", f"cprop-{cprop.__version__}.dist-info"}


def functions_of(path):
    """The functions of a file, each with the number of lines of its body, docstring aside."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            yield f"{node.name}, line {node.lineno}", body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_function_is_longer_than_forty_lines():
    lengths = {(module, name): length for module, path in MODULES.items() for name, length in functions_of(path)}
    assert len(lengths) > 500
    assert {name: length for name, length in lengths.items() if length > 40} == {}
