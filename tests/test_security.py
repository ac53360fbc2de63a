"""What the package never does with data: `docs/security.md` promises it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("expert_cache_shim", "bench", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}


def breaches(tree: ast.AST) -> Iterator[str]:
    """Ways to run what a file or a variable says, by line."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        for name in names:
            if name in MODULES:
                yield f"{node.lineno}: import {name}"
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in CALLS:
                yield f"{node.lineno}: {function}()"
            for keyword in node.keywords:
                if (
                    keyword.arg in ("shell", "allow_pickle")
                    and ast.unparse(keyword.value) != "False"
                ):
                    yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_what_data_says(path):
    assert list(breaches(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("code", [
    "import pickle", "from pickle import loads", "import torch; torch.load(path)", "eval(text)",
    "subprocess.run(text, shell=True)", "np.load(path, allow_pickle=allowed)", "os.system(text)",
])  # fmt: skip
def test_a_breach_is_seen(code):
    assert len(list(breaches(ast.parse(code)))) == 1
