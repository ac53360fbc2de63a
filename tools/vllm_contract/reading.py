"""A release's sources as syntax trees: classes, functions, what they have and what they call."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


class Differs(Exception):
    """A release is not as the shim takes it to be."""


@dataclass(frozen=True)
class Found:
    """A piece of a file."""

    source: Source
    node: ast.AST

    @property
    def place(self) -> str:
        return f"{self.source.name}:{self.node.lineno}"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def text(self) -> str:
        return ast.unparse(self.node)

    @property
    def parameters(self) -> list[str]:
        """Names of a function's parameters, without `self`, `*args` and `**kwargs`."""
        found = self.node.args
        names = [a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
        return names[1:] if names[:1] == ["self"] else names

    @property
    def keywords(self) -> dict[str, str]:
        """The arguments that a call passes by name."""
        return {k.arg: ast.unparse(k.value) for k in self.node.keywords if k.arg}

    @property
    def bases(self) -> list[str]:
        return [_last_name(base) for base in self.node.bases]

    @property
    def methods(self) -> dict[str, Found]:
        """A class's own methods: inherited ones are not among them."""
        return {n.name: Found(self.source, n) for n in _statements(self.node) if _is_function(n)}

    def method(self, name: str) -> Found:
        if name not in self.methods:
            raise Differs(f"{self.name} ({self.place}) has no {name}")
        return self.methods[name]

    @property
    def decorators(self) -> set[str]:
        return {_last_name(decorator) for decorator in self.node.decorator_list}

    @cached_property
    def fields(self) -> dict[str, Found]:
        """What the body of a class annotates or assigns."""
        return {
            target.id: Found(self.source, statement)
            for statement in _statements(self.node)
            for target in _targets(statement)
            if isinstance(target, ast.Name)
        }

    @cached_property
    def attributes(self) -> dict[str, Found]:
        """What methods of a class assign to `self`, or register there as a buffer."""
        found = {}
        for node in ast.walk(self.node):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.setdefault(target.attr, Found(self.source, node))
        for call in self.calls("register_buffer"):
            name = call.node.args[0] if call.node.args else None
            if isinstance(name, ast.Constant):
                found.setdefault(name.value, call)
        return found

    def calls(self, name: str) -> Iterator[Found]:
        """Calls of `name(...)` or `anything.name(...)`."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call) and _last_name(node.func) == name:
                yield Found(self.source, node)

    def returns(self, *names: str) -> Iterator[Found]:
        """Where a tuple of these names is returned."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                if [ast.unparse(part) for part in node.value.elts] == list(names):
                    yield Found(self.source, node)

    def reads(self, *names: str) -> Iterator[Found]:
        """Where an attribute of one of these names is read, of whatever object."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and node.attr in names:
                yield Found(self.source, node)


class Source:
    """One file. `name` is its path from the folder that holds vllm/."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text

    @cached_property
    def root(self) -> Found:
        return Found(self, ast.parse(self.text))

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def classes(self) -> dict[str, Found]:
        return {
            n.name: Found(self, n)
            for n in _statements(self.root.node)
            if isinstance(n, ast.ClassDef)
        }

    @property
    def functions(self) -> dict[str, Found]:
        return self.root.methods

    def cls(self, name: str) -> Found:
        if name not in self.classes:
            raise Differs(f"{self.name} has no class {name}")
        return self.classes[name]

    def function(self, name: str) -> Found:
        if name not in self.functions:
            raise Differs(f"{self.name} has no function {name}")
        return self.functions[name]

    def assigned(self, name: str) -> Found:
        """An assignment in the body of the module."""
        if name not in self.root.fields:
            raise Differs(f"{self.name} does not assign {name}")
        return self.root.fields[name]

    def imports(self, name: str) -> Found | None:
        """`from ... import name`, wherever in the file."""
        if name not in self.text:
            return None
        for node in ast.walk(self.root.node):
            if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
                return Found(self, node)
        return None


class Release:
    """The sources of one release, read as they are asked for."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.folder = folder
        self._sources: dict[str, Source] = {}

    def _source(self, path: Path) -> Source:
        name = path.relative_to(self.folder).as_posix()
        if name not in self._sources:
            self._sources[name] = Source(name, path.read_text(encoding="utf-8"))
        return self._sources[name]

    def module(self, name: str) -> Source:
        path = self.folder.joinpath(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.exists():
                return self._source(candidate)
        raise Differs(f"there is no {name}")

    def sources(self, package: str = "vllm", mentioning: str = "") -> Iterator[Source]:
        """Every file of a package; only those that contain a text, if one is given."""
        for path in sorted(self.folder.joinpath(*package.split(".")).rglob("*.py")):
            source = self._source(path)
            if mentioning in source.text:
                yield source

    def classes(self, name: str) -> list[Found]:
        """The classes of a name, in whatever file they are: at least one."""
        sources = self.sources(mentioning=f"class {name}")
        found = [source.classes[name] for source in sources if name in source.classes]
        if not found:
            raise Differs(f"there is no class {name}")
        return found

    def cls(self, name: str) -> Found:
        """The one class of a name."""
        first, *others = self.classes(name)
        if others:
            raise Differs(f"{name} is at {first.place} and at {others[0].place}")
        return first

    def subclasses(self, name: str) -> dict[str, Found]:
        """Classes that derive from a class, also by way of others, and the class itself."""
        classes = [c for s in self.sources(mentioning="class ") for c in s.classes.values()]
        names = {name}
        while more := {c.name for c in classes if names & set(c.bases)} - names:
            names |= more
        return {c.name: c for c in classes if c.name in names}

    def ancestry(self, found: Found) -> list[Found]:
        """A class and those of its bases that are to be found."""
        chain = [found]
        for base in chain:
            for name in base.bases:
                with contextlib.suppress(Differs):
                    more = base.source.classes.get(name) or self.cls(name)
                    if more not in chain:
                        chain.append(more)
        return chain


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, `b` of `a.b(...)`, `a` of `a[...]`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return ""


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a body, those under `if` and `try` included."""
    for name in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(node, name, []):
            yield statement
            if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _statements(statement)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    found = node.targets if isinstance(node, ast.Assign) else []
    return [e for t in found for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
