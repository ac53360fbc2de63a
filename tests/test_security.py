"""What the package never does with data: `docs/security.md` promises it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("expert_cache_shim", "bench", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "runpy",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load",
    "subprocess.getoutput", "subprocess.getstatusoutput", "pandas.read_pickle", "numpy.fromregex",
    "logging.config.fileConfig", "logging.config.dictConfig", "ctypes.PyDLL",
}  # fmt: skip
# What runs or loads something of a name that is not written there.
BY_NAME = re.compile(r"os\.(exec|spawn|posix_spawn)\w*|importlib\.import_module|ctypes\.CDLL")
ALLOWED = {
    # The library that was checked, and the HIP runtime that is loaded already.
    "expert_cache_shim/native.py": ["ctypes.CDLL()", "ctypes.CDLL()"],
    # PyTorch's own version.py, without the seconds that importing PyTorch takes.
    "expert_cache_shim/commands/machine.py": ["import runpy"],
}


def breaches(tree: ast.AST) -> Iterator[str]:
    """Ways to run what a file or a variable says, by line."""
    names: dict[str, str] = {}  # what the file calls things, and what they are called elsewhere
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        else:
            continue
        names.update(found)
        for name in found.values():
            if name.split(".")[0] in MODULES:
                yield f"{node.lineno}: import {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        function = ".".join([names.get(first, first), *rest])
        named_here = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if function in CALLS or (BY_NAME.fullmatch(function) and not named_here):
            yield f"{node.lineno}: {function}()"
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_what_data_says(path):
    found = [breach.split(": ", 1)[1] for breach in breaches(ast.parse(path.read_text()))]
    assert found == ALLOWED.get(path.relative_to(ROOT).as_posix(), [])


@pytest.mark.parametrize("code", [
    "import pickle", "from pickle import loads", "import torch; torch.load(path)", "eval(text)",
    "subprocess.run(text, shell=True)", "np.load(path, allow_pickle=allowed)", "os.system(text)",
    "from os import system; system(text)", "import torch as t; t.load(path)",
    "from torch import load as read; read(path)", "import os; os.execvp(name, words)",
    "import subprocess; subprocess.getoutput(text)", "import ctypes; ctypes.CDLL(path)",
    "import importlib; importlib.import_module(name)",
])  # fmt: skip
def test_a_breach_is_seen(code):
    assert len(list(breaches(ast.parse(code)))) == 1
