"""The project as pip sees it: a copy to build from, the wheel, and pip for another environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from start_up import ROOT, Interpreter

NOT_OURS = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


def can_build_wheels() -> bool:
    """Whether this Python has pip, and setuptools 70.1 or an older one with wheel."""
    try:
        major, minor = metadata.version("setuptools").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    with_wheel = (int(major), int(minor)) >= (70, 1) or find_spec("wheel") is not None
    return with_wheel and find_spec("pip") is not None


def copy_project(folder: Path) -> Path:
    """The project as a user has it after building the kernels for this machine."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_OURS))
    for backend in ("host", "cuda"):
        (folder / "expert_cache_shim" / "lib" / f"libexpertcache_{backend}.so").write_text("local")
    return folder


def build_wheel(source: Path, out: Path) -> Path:
    """`pip wheel`, with the setuptools that is here and no index."""
    call_pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    (built,) = out.iterdir()
    return built


def call_backend(source: Path, what: str, out: Path, settings: dict | None = None) -> Path:
    """Calls a hook of the build backend, as pip does without build isolation: `what` is wheel,
    sdist or editable."""
    code = (
        "import sys, setuptools.build_meta as backend; "
        f"print(backend.build_{what}({str(out)!r}, {settings!r}))"
    )
    out.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def pip(python: Interpreter, *arguments: object) -> None:
    """pip of this Python, at work on another environment."""
    call_pip("--python", python.executable, *arguments)


def call_pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
