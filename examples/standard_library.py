"""Read Python's own standard library: what it documents, and where its functions are. Nothing is imported."""

from __future__ import annotations

import ast
import builtins
import cmath
import itertools
import math
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["module", "class", "function", "method", "property"]

# Tests and test helpers; machine-made tables; modules that say the same as another one under its public name.
NOT_SUBJECTS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip", "distutils",
    "site-packages", "dist-packages", "lib-dynload", "__pycache__", "ntpath.py", "nturl2path.py",
}  # fmt: skip
# Modules without Python sources, whose names another module may well use, too.
COMPILED_MODULES = (builtins, cmath, itertools, math, time)
# Where the source's name is not the one that people write.
PUBLIC_NAMES = {
    "posixpath": "os.path",
    "genericpath": "os.path",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_collections_abc": "collections.abc",
}

NO_SOURCES = (
    "{root} has no Python sources with docstrings: install the standard library's .py files (some minimal images keep "
    "only compiled ones), or run another Python"
)


@dataclass(frozen=True)
class Subject:
    """Something with a docstring. `signature` and `more` are empty when there is none."""

    name: str
    kind: Kind
    module: str
    signature: str
    summary: str
    more: str


@dataclass(frozen=True)
class Fact:
    """The only module that has a public function of this name."""

    function: str
    module: str


def standard_library() -> Path:
    """The folder of the running Python's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_subjects(root: Path, modules: Sequence[str] | None = None) -> list[Subject]:
    """Everything public below `root` that has a usable docstring, in the order of file and line.

    Files are parsed, never imported: the result does not depend on what can be imported here. A paragraph is
    taken once, where it occurs first, so no text can be in two splits.

    Raises FileNotFoundError when there are no sources.
    """
    subjects: list[Subject] = []
    taken: set[str] = set()
    for path in _sources(root, modules):
        for subject in _subjects_of(ast.parse(path.read_bytes()), _module_name(path.relative_to(root))):
            if subject.summary not in taken:
                subjects.append(replace(subject, more="") if subject.more in taken else subject)
                taken |= {subject.summary, subject.more}
    if not subjects:
        raise FileNotFoundError(NO_SOURCES.format(root=root))
    return subjects


def collect_facts(root: Path) -> list[Fact]:
    """Functions that a module names in its `__all__` and no other module defines, by name.

    One that is called as its module is would be no question.

    Raises FileNotFoundError when there are no sources.
    """
    places: defaultdict[str, set[str]] = defaultdict(set)
    functions: set[str] = set()
    exported: defaultdict[str, set[str]] = defaultdict(set)
    for path in _sources(root, None):
        tree, module = ast.parse(path.read_bytes()), _module_name(path.relative_to(root))
        exported[module] |= _exported(tree)
        for node in _definitions(tree.body):
            places[node.name].add(module)
            if not isinstance(node, ast.ClassDef) and node.name[0].islower():
                functions.add(node.name)
    if not places:
        raise FileNotFoundError(NO_SOURCES.format(root=root))
    elsewhere = {name for module in COMPILED_MODULES for name in dir(module)}
    return [
        Fact(name, module)
        for name in sorted(functions - elsewhere)
        for module in places[name]
        if len(places[name]) == 1 and name in exported[module] and name != module.rpartition(".")[2]
    ]


def _exported(tree: ast.Module) -> set[str]:
    """The names that a module lists in `__all__`, in one piece or in several."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                values = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
                names |= {value for value in values if isinstance(value, str)}
    return names


def _sources(root: Path, modules: Sequence[str] | None) -> Iterator[Path]:
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if modules is not None and entry.name.removesuffix(".py") not in modules:
            continue
        if entry.suffix == ".py":
            candidates = [entry]
        elif (entry / "__init__.py").exists():
            candidates = sorted(entry.rglob("*.py"), key=lambda path: path.relative_to(root).parts)
        else:
            continue
        for path in candidates:
            parts = path.relative_to(root).parts
            if NOT_SUBJECTS.isdisjoint(parts) and _is_public(_module_name(Path(*parts))):
                yield path


def _module_name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    return PUBLIC_NAMES.get(name, name)


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _subjects_of(tree: ast.Module, module: str) -> Iterator[Subject]:
    yield from _subject(tree, module, "module", module)
    for node in _definitions(tree.body):
        name = f"{module}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _subject(node, name, "class", module)
            for method in _definitions(node.body):
                if not isinstance(method, ast.ClassDef):
                    kind: Kind = "property" if _is_property(method) else "method"
                    yield from _subject(method, f"{name}.{method.name}", kind, module)
        else:
            yield from _subject(node, name, "function", module)


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Public definitions, also those that depend on the platform or on what could be imported."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            if _is_public(node.name):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body)
            yield from _definitions(node.orelse)


def _is_property(method: Function) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)


def _subject(node: ast.Module | ast.ClassDef | Function, name: str, kind: Kind, module: str) -> Iterator[Subject]:
    """One subject, or nothing when the docstring's first paragraph makes no good answer."""
    paragraphs = [" ".join(part.split()) for part in (ast.get_docstring(node) or "").split("\n\n")]
    if _is_prose(paragraphs[0]):
        more = paragraphs[1] if len(paragraphs) > 1 and _is_prose(paragraphs[1]) else ""
        signature = "" if kind == "property" else _signature(node, name)
        yield Subject(name, kind, module, signature, paragraphs[0], more)


def _is_prose(text: str) -> bool:
    return 20 <= len(text) <= 400 and text.isascii() and ">>>" not in text and "<|" not in text


def _signature(node: ast.AST, name: str) -> str:
    """`name(arguments)` without the receiver; a class takes that of its `__init__`."""
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return _signature(member, name)
    if not isinstance(node, Function):
        return ""
    arguments = ast.unparse(node.args).split(", ")
    if arguments[0] in ("self", "cls"):
        del arguments[: 2 if arguments[1:2] == ["/"] else 1]
    signature = f"{name}({', '.join(arguments)})"
    return signature if len(signature) <= 160 and signature.isascii() else ""
