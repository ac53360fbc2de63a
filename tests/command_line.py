"""Images as `expert-cache` meets them: a Python without pip, typer or PyTorch, and a package that
was copied somewhere."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import wrapt
from start_up import CURRENT, PACKAGE, ROOT, Interpreter, Outcome, make_venv

from expert_cache_shim.commands import start_up

# Bytecode comes along: it is valid where the times of the sources are kept.
LOCAL = ("libexpertcache_host.so", "libexpertcache_cuda.so")


def put_whole_package(folder: Path, with_sources: bool = False) -> Path:
    """The package as the repository has it, and the kernel sources where a wheel has them."""
    package = folder / "expert_cache_shim"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(*LOCAL))
    if with_sources:
        shutil.copytree(ROOT / "hip", package / "hip", ignore=shutil.ignore_patterns("tests"))
    return folder


@dataclass(frozen=True)
class Image:
    """A Python with wrapt, and the folder in which the package lies."""

    python: Interpreter
    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / "expert_cache_shim"

    @property
    def hook(self) -> Path:
        return self.python.site_packages / "expert_cache_shim.pth"

    def enable(self) -> Image:
        """What `expert-cache enable` does, without a process of its own."""
        self.hook.write_text(f"{start_up.MARK}\n{self.folder}\n{start_up.START}\n")
        return self

    def call(self, *words: str, **environ: str) -> Outcome:
        """`expert-cache WORDS`, from the folder of the package where it is not on the path."""
        environ = {"PATH": os.environ["PATH"], "COLUMNS": "500"} | environ
        return self.python.run("-m", "expert_cache_shim", *words, cwd=self.folder, **environ)

    def typed(self, *words: str) -> str:
        """The command as messages name it: no script is there, and its Python is not on PATH."""
        return " ".join([str(self.python.executable), "-m", "expert_cache_shim", *words])

    def refusal(self, *words: str, **environ: str) -> str:
        """The one line with which a command refuses."""
        outcome = self.call(*words, **environ)
        assert outcome.status == 1 and outcome.err.count("\n") == 1, outcome
        return outcome.err.rstrip("\n").split(f"expert_cache_shim {words[0]}: ", 1)[1]


def make_image(folder: Path, version: str = CURRENT, with_sources: bool = False) -> Image:
    python = make_venv(version, folder / "venv", "--without-pip")
    source = Path(wrapt.__file__).parent
    shutil.copytree(source, python.site_packages / "wrapt", ignore=shutil.ignore_patterns("*.so"))
    return Image(python, put_whole_package(folder / "opt", with_sources))


def put_torch(python: Interpreter, code: str = "", **versions: str) -> None:
    """Stands in for a PyTorch of the given `cuda` or `hip` version."""
    package = python.site_packages / "torch"
    package.mkdir()
    lines = [f"{name} = {versions.get(name)!r}" for name in ("cuda", "hip")]
    (package / "version.py").write_text("\n".join(["__version__ = '2.99'", *lines, ""]))
    (package / "__init__.py").write_text(f"from .version import __version__\n{code}")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
