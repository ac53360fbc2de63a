"""The texts that the package can show a user, read from its source.

A *shape* is such a text with "…" where something is filled in: what `%s` or `{value}` stands for
in the source, and in a document what differs from case to case.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "expert_cache_shim"
ANY = "…"


class Module:
    """One source file; names of its constant strings can be resolved."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self._functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }
        self._strings: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._strings[node.targets[0].id] = self.shape(node.value)

    def shape(self, node: ast.AST) -> str:
        """The shape of an expression that gives a string; "…" for what only a run can tell."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.sub("%[srd]", ANY, node.value)
        if isinstance(node, ast.JoinedStr):
            return self._joined(node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([node.left, node.right])
        if isinstance(node, ast.FormattedValue):
            return self.shape(node.value)
        if isinstance(node, ast.Name):
            return self._strings.get(node.id, ANY)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.returned(node.func.id)
        return ANY

    def _joined(self, nodes: list[ast.expr]) -> str:
        return re.sub(f"{ANY}+", ANY, "".join(map(self.shape, nodes)))

    def returned(self, function: str) -> str:
        """What a one-line function of this module returns."""
        body = getattr(self._functions.get(function), "body", [])
        return self.shape(body[-1].value) if body and isinstance(body[-1], ast.Return) else ANY

    def calls(self, function: str) -> Iterator[list[str]]:
        """The shapes of the arguments of each call of a class or function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
                yield [self.shape(argument) for argument in node.args]

    def strings(self) -> Iterator[str]:
        """Every string of the source as a shape, docstrings included."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                yield self.shape(node)


def module(name: str) -> Module:
    return Module(PACKAGE / f"{name}.py")


def all_modules() -> list[Module]:
    return [Module(path) for path in sorted(PACKAGE.glob("*.py"))]


def fits(shape: str, text: str) -> bool:
    """Whether filling in the shape can give this text."""
    return re.fullmatch(".+".join(map(re.escape, shape.split(ANY))), text) is not None
