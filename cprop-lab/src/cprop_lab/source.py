"""The source of your own tasks and optimizers: read once, hashed, shipped to the workers, imported from what was read.

A file changes while it is worked on, and a process keeps what it has imported. So a process reads each module once,
imports it from that text, and hands the text to the processes that it starts: whatever happens to the file, all runs
of a sweep run the code that names them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import linecache
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

__all__ = ["Module", "adopt", "digest", "load", "own_frames", "read", "told"]


class Module(NamedTuple):
    """A module as it was read.

    Args:
        file: where it came from; none if it is a folder without ``__init__.py``.
        folders: where its submodules are, if it is a package.
        text: its source.
    """

    file: str | None
    folders: tuple[str, ...] | None
    text: bytes


INSTALLED: Final = {
    Path(folder).resolve()
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")),  # of a .pth file
    )
}


class _Imported(MetaPathFinder, ExecutionLoader):
    """Imports modules from their texts, under their files' names: tracebacks and ``__file__`` are as usual."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        file, folders, _ = self.modules[fullname]
        spec = ModuleSpec(fullname, self, origin=file, is_package=folders is not None)
        spec.has_location = file is not None
        if folders is not None:
            spec.submodule_search_locations = list(folders)
        return spec

    def get_filename(self, fullname: str) -> str:
        return self.modules[fullname].file or f"<{fullname}>"

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.modules[fullname].text)

    def exec_module(self, module: ModuleType) -> None:
        # Tracebacks quote the lines that run, also when the file has changed or is on another machine.
        lines = self.get_source(module.__name__).splitlines(keepends=True)
        linecache.cache[self.get_filename(module.__name__)] = (0, None, lines, self.get_filename(module.__name__))
        super().exec_module(module)


_imported: Final = _Imported()
_read: Final[dict[str, dict[str, Module]]] = {}


def read(task: str) -> dict[str, Module]:
    """A task's module and all modules of your own that it imports, directly or not; nothing if there is no such file.

    Your own are those of the task's package, and those that are neither installed nor Python's.
    """
    if task not in _read:
        found: dict[str, Module] = {}
        waiting = list(_with_parents(task))
        while waiting:
            name = waiting.pop()
            if name not in found and (module := _find(name, task)) is not None:
                found[name] = module
                waiting += _imports(name, module)
        if task in found:
            _know(found)
            _read[task] = found
    return _read.get(task, {})


def load(module: str, name: str = "") -> Any:
    """A module of your own, or something in it, imported from what was read; also from the current folder.

    Raises:
        ValueError: if it cannot be imported, or has no source to be hashed.
    """
    wanted = f"{module}:{name}" if name else module
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    known = read(module)
    try:
        found = importlib.import_module(module)
        found = getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{wanted!r} cannot be imported from {here}: {error}") from error
    except Exception as error:
        raise ValueError(f"{wanted!r} cannot be imported: {told(error)}") from error
    if not known:
        raise ValueError(f"{wanted!r} has no source that could be hashed: put it into a .py file")
    return found


def adopt(sources: Mapping[str, Mapping[str, Module]]) -> None:
    """Import tasks from what another process has read.

    Raises:
        RuntimeError: if this process has already imported something else under such a name.
    """
    for task, modules in sources.items():
        for name, module in modules.items():
            known = _imported.modules.get(name)
            if (known or module).text != module.text or (known is None and name in sys.modules):
                raise RuntimeError(
                    f"module {name!r} of task {task} was imported here before, maybe in another version: give it a "
                    "name that no other package has, or start the sweep again"
                )
        _know(modules)
        _read[task] = dict(modules)


def digest(task: str) -> str:
    """A digest of the task's code, which is part of its runs' ids."""
    files = {name: hashlib.sha256(module.text) for name, module in read(task).items() if module.file}
    if len(files) == 1:
        return files[task].hexdigest()[:16]
    lines = "".join(f"{name} {files[name].hexdigest()}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an exception went through your own code."""
    files = {module.file for module in _imported.modules.values()}
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]


def told(error: BaseException) -> str:
    """An exception with its traceback from your own code on: how the laboratory came there helps nobody."""
    frames, own = traceback.extract_tb(error.__traceback__), own_frames(error)
    shown = traceback.format_list(frames[frames.index(own[0]) :]) if own else []
    text = "".join([*shown, *traceback.format_exception_only(error)]).rstrip()
    return f"\n{text}" if "\n" in text else text


def _know(modules: Mapping[str, Module]) -> None:
    _imported.modules.update(modules)
    if _imported not in sys.meta_path:
        sys.meta_path.insert(0, _imported)


def _find(name: str, task: str) -> Module | None:
    """A module of the user's own."""
    parent, _, last = name.rpartition(".")
    if parent:
        above = _find(parent, task)
        # By its last name: for a dotted one, a folder without __init__.py would need its parent to be imported.
        spec = PathFinder.find_spec(last, above.folders) if above and above.folders else None
    else:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # __main__
            spec = None
    if spec is None or not _is_own(name.partition(".")[0], spec, task):
        return None
    if name in _imported.modules:
        return _imported.modules[name]
    file = spec.origin if spec.has_location else None
    folders = spec.submodule_search_locations
    return Module(file, None if folders is None else tuple(folders), Path(file).read_bytes() if file else b"")


def _is_own(top: str, spec: ModuleSpec, task: str) -> bool:
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations
    if top in ("cprop", "cprop_lab") or not places or (spec.has_location and not str(spec.origin).endswith(".py")):
        return False
    return top == task.partition(".")[0] or not any(
        Path(str(place)).resolve().is_relative_to(folder) for place in places for folder in INSTALLED
    )


def _imports(name: str, module: Module) -> Iterator[str]:
    """What a module may import: whether ``from a import b`` means a module b, the folder says."""
    try:
        tree = ast.parse(module.text)
    except SyntaxError:  # the import will say so
        return
    package = name if module.folders is not None else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # beyond the topmost package: the import will say so
                continue
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
