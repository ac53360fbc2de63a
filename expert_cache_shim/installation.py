"""Which commands this user has: those of a clone with its Makefile, or those of an installation.

Needs the standard library only, as a worker that finds no kernels and an image that is not
complete yet both ask.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# The variables in which hip/build.sh takes the architectures to build for.
ARCHITECTURES = {"hip": "EXPERT_CACHE_ARCHS", "cuda": "CUDA_ARCHS"}


def invocation(*words: str) -> str:
    """The command as this user can type it: an image without pip has no script of that name, and
    what a shell finds may be that of another Python."""
    python = sys.executable or "python"
    script = os.path.join(os.path.dirname(python), "expert-cache")
    if os.access(script, os.X_OK):
        return " ".join([_typed(script), *words])
    return " ".join([_typed(python), "-m", PACKAGE.name, *words])


def _typed(file: str) -> str:
    """The bare name where that is what a shell finds, else the path."""
    name = os.path.basename(file)
    return name if shutil.which(name) == file else shlex.quote(file)


def build_command(backend: str, architecture: str = "") -> str:
    """What builds the kernels of a backend ("hip", "cuda" or "host") into this package: `make` in
    a clone, else `expert-cache build`. Without an architecture: for the GPUs of this machine."""
    clone = PACKAGE.parent
    if (clone / "Makefile").is_file() and (clone / "hip" / "build.sh").is_file():
        command = f"make -C {shlex.quote(str(clone))} {backend}"
        return f"{ARCHITECTURES[backend]}={architecture} {command}" if architecture else command
    name = architecture or ("host" if backend == "host" else "")
    return invocation("build", *(["--arch", name] if name else []))
