"""Real interpreters with nothing installed, and folders that hold the shim in several states."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "expert_cache_shim"
HOOK = ROOT / "expert_cache_shim.pth"
SITECUSTOMIZE = ROOT / "sitecustomize.py"
CURRENT = f"{sys.version_info[0]}.{sys.version_info[1]}"

# Stands in for the real hooks where a test asks when and how often they are registered.
SAYS_REGISTERED = "def register():\n    print('registered')\n"


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Interpreter:
    """One Python with a site-packages of its own."""

    executable: Path
    site_packages: Path

    def run(self, *arguments: str, path=(), cwd=None, **environ: str) -> Outcome:
        """Runs it with `path` as PYTHONPATH and nothing else of this process's environment."""
        if path:
            environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
        # Never in the source tree: with -c, the current folder is on sys.path.
        done = subprocess.run(
            [str(self.executable), *arguments],
            env=environ,
            cwd=cwd or self.executable.parent,
            capture_output=True,
            text=True,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def says(self, code: str, *flags: str, **options) -> str:
        """What `code` prints; fails where it does not run cleanly."""
        outcome = self.run(*flags, "-c", code, **options)
        assert (outcome.status, outcome.err) == (0, ""), outcome
        return outcome.out.strip()


@functools.cache
def find_python(version: str) -> Path:
    """A Python of this version on PATH or among pyenv's; skips the test where there is none."""
    if version == CURRENT:
        return Path(os.path.realpath(sys.executable))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
    for candidate in filter(None, candidates):
        # A pyenv shim exists for versions that are not active, and fails.
        done = subprocess.run(
            [candidate, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
        )
        if done.returncode == 0:
            return Path(done.stdout.strip())
    pytest.skip(f"no Python {version} on this machine")


def make_venv(version: str, folder: Path, *options: str) -> Interpreter:
    subprocess.run([find_python(version), "-m", "venv", *options, folder], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    return Interpreter(folder / "bin" / "python", site_packages)


def put_shim(folder: Path, hooks: str = SAYS_REGISTERED) -> Path:
    """The start-up half of the package, with `hooks` as what it leads to."""
    package = folder / "expert_cache_shim"
    package.mkdir(parents=True)
    for name in ("__init__.py", "bootstrap.py"):
        shutil.copy(PACKAGE / name, package)
    (package / "hooks.py").write_text(hooks)
    return folder


def put_shim_for_pythonpath(folder: Path, hooks: str = SAYS_REGISTERED) -> Path:
    shutil.copy(SITECUSTOMIZE, put_shim(folder, hooks))
    return folder


def put_shim_in_site_packages(python: Interpreter, hooks: str = SAYS_REGISTERED) -> Interpreter:
    shutil.copy(HOOK, put_shim(python.site_packages, hooks))
    return python


def put_vllm(folder: Path) -> Path:
    """A package with vLLM's name, and one of its modules."""
    loader = folder / "vllm" / "model_executor" / "model_loader"
    loader.mkdir(parents=True)
    for package in (loader, *loader.parents[:2]):
        (package / "__init__.py").write_text("")
    (folder / "vllm" / "__init__.py").write_text("print('vllm')\n")
    (loader / "utils.py").write_text("print('utils')\n")
    return folder
