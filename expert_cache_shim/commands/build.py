"""`build`: compiles the kernel library for this machine, tries it, and puts it into place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

from .. import native
from ..installation import ARCHITECTURES, PACKAGE
from . import CommandError, Option
from .library_file import check_file, default_file, write_checksum
from .machine import amd_architectures, nvidia_architectures, torch_backend
from .probe import probe

BACKEND_OF = {"clang": "hip", "hipcc": "hip", "nvcc": "cuda"}


def build(
    arch: Annotated[
        list[str],
        Option(
            "--arch",
            "Architecture: gfx1100, say, or sm_90; again for more. `host` is the CPU, for tests. "
            "Default: the GPUs found here.",
            "NAME",
        ),
    ] = (),
    compiler: Annotated[
        str, Option("--with", "Compiler: clang or hipcc (AMD), nvcc (NVIDIA).", "NAME")
    ] = "",
    output: Annotated[
        str, Option("--output", "Where the library goes, instead of into the package.", "FILE")
    ] = "",
) -> int:
    """Build the kernel library for this machine."""
    script = find_script()
    archs = [name for text in arch for name in re.split(r"[\s,;]+", text) if name]
    backend, why = choose_backend(archs, compiler)
    environ, target = _environment(backend, archs)
    target_file = Path(output).absolute() if output else default_file(backend)
    _require_writable(target_file, backend)
    print(f"building for {target} ({why})", flush=True)
    said = _build_into_place(script, backend, compiler, target_file, environ)
    if target_file == default_file(backend):
        placed = [target_file, *([write_checksum(target_file)] if backend == "hip" else [])]
        _tell_pip(placed)
    print(f"built {target_file}: {said}")
    if output:
        print(f"to use it: export EXPERT_CACHE_LIB={target_file}")
    return 0


def _build_into_place(
    script: Path, backend: str, compiler: str, file: Path, environ: dict[str, str]
) -> str:
    """What was there stays until the new library is known to be good; what that one says."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=".build-", dir=file.parent)
    except OSError:  # a file system that is read-only, whatever the permissions say
        raise _cannot_write(file.parent) from None
    with folder as name:
        built = Path(name) / file.name
        _compile(script, backend, compiler, built, environ)
        said = _try(built, backend)
        os.replace(built, file)
    return said


def find_script() -> Path:
    """build.sh among the kernel sources: a wheel has them in the package, a clone beside it."""
    for folder in (PACKAGE / "hip", PACKAGE.parent / "hip"):
        if (folder / "build.sh").is_file() and (folder / "expert_cache.hip.cpp").is_file():
            return folder / "build.sh"
    raise CommandError(
        f"{PACKAGE}: has no kernel sources, neither in its hip/ nor in one beside it; "
        "install the wheel, or copy the folder hip of the repository into the package"
    )


def choose_backend(archs: list[str], compiler: str) -> tuple[str, str]:
    """The backend to build for, and what decided it."""
    if compiler and compiler not in BACKEND_OF:
        raise CommandError(f"--with {compiler}: must be one of {', '.join(BACKEND_OF)}")
    wanted = {_backend_of(name) for name in archs}
    if compiler:
        wanted.add(BACKEND_OF[compiler])
    if len(wanted) > 1:
        asked = [f"--arch {name}" for name in archs] + ([f"--with {compiler}"] if compiler else [])
        raise CommandError(f"{', '.join(asked)}: one library is for one kind of GPU; run it twice")
    if wanted:
        return wanted.pop(), "as asked"
    backend, version = torch_backend()
    if backend in ARCHITECTURES:
        return backend, f"for torch {version}"
    found = {"hip": amd_architectures(), "cuda": nvidia_architectures()}
    kinds = [backend for backend, names in found.items() if names]
    if len(kinds) == 1:
        return kinds[0], "the GPU found here"
    if kinds:
        raise CommandError("GPUs of AMD and of NVIDIA are here; say which by --with or --arch")
    compilers = [name for name in ("hip", "cuda") if _has_compiler(name)]
    if len(compilers) == 1:
        return compilers[0], "the one compiler found here, no GPU"
    if compilers:
        raise CommandError("no GPU is here, and compilers for both; say --with or --arch")
    raise CommandError(
        "no GPU is here and no compiler: neither hipcc or clang-19 (AMD) nor nvcc (NVIDIA); "
        "install one, or set HIPCC, HIP_PATH or NVCC"
    )


def _backend_of(arch: str) -> str:
    if arch == "host":
        return "host"
    for pattern, backend in ((r"gfx[0-9a-f]+", "hip"), (r"sm_[0-9]+[a-z]?", "cuda")):
        if re.fullmatch(pattern, arch):
            return backend
    raise CommandError(f"--arch {arch}: must be like gfx942 (AMD), sm_90 (NVIDIA), or host")


def _has_compiler(backend: str) -> bool:
    """Whether build.sh will find one; it looks in the same places and reports better."""
    named = {"hip": ("HIPCC", "CLANG"), "cuda": ("NVCC",)}[backend]
    folders = {
        "hip": [os.environ.get("HIP_PATH"), os.environ.get("ROCM_PATH"), "/opt/rocm"],
        "cuda": [os.environ.get("CUDA_HOME"), "/usr/local/cuda"],
    }[backend]
    tools = {"hip": ("hipcc", "clang-19"), "cuda": ("nvcc",)}[backend]
    candidates = [os.environ.get(name) for name in named] + list(tools)
    candidates += [f"{folder}/bin/{tools[0]}" for folder in folders if folder]
    if backend == "hip":
        candidates += map(str, _wheel_hipcc())
    return any(candidate and shutil.which(candidate) for candidate in candidates)


def _wheel_hipcc() -> list[Path]:
    """hipcc of ROCm's own wheels in this Python."""
    return sorted(Path(sysconfig.get_path("purelib")).glob("_rocm_sdk_*/bin/hipcc"))


def _environment(backend: str, archs: list[str]) -> tuple[dict[str, str], str]:
    """What build.sh is run with, and the architectures in words."""
    # Its last resort is the Python on PATH, to find a hipcc among the wheels of that one.
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    environ = os.environ | {"PATH": os.pathsep.join(folders)}
    if backend == "host":
        return environ, "the CPU"
    variable = ARCHITECTURES[backend]
    if archs:
        environ[variable] = " ".join(archs)
    elif not environ.get(variable):  # one that is set already is the user's choice
        environ[variable] = " ".join(_found_here(backend))
    return environ, environ[variable] or f"the usual {backend} architectures, as no GPU is here"


def _found_here(backend: str) -> tuple[str, ...]:
    found = {"hip": amd_architectures, "cuda": nvidia_architectures}[backend]()
    if not found and torch_backend()[0] == backend:
        # Under WSL a GPU has no entry of the kernel driver's; PyTorch sees it.
        gpus = probe(["torch"], backend, Path())["torch"].get("gpus", [])
        found = tuple(sorted({gpu["architecture"].split(":")[0] for gpu in gpus}))
    return found


def _require_writable(file: Path, backend: str) -> None:
    if file.is_dir():
        raise CommandError(f"--output {file}: is a folder; name the file")
    # Not there in a package that was copied without its libraries.
    if file == default_file(backend) and os.access(PACKAGE, os.W_OK):
        file.parent.mkdir(exist_ok=True)
    if not file.parent.is_dir():
        raise CommandError(f"{file.parent}: no such folder; make it, or name another by --output")
    if not os.access(file.parent, os.W_OK):
        raise _cannot_write(file.parent)


def _cannot_write(folder: Path) -> CommandError:
    return CommandError(
        f"{folder}: cannot be written; `--output FILE` builds elsewhere, and "
        "EXPERT_CACHE_LIB=FILE uses it"
    )


def _compile(script: Path, backend: str, compiler: str, out: Path, environ: dict[str, str]) -> None:
    choice = ["--with", compiler] if compiler in ("clang", "hipcc") else []
    command = ["bash", str(script), backend, *choice, str(out)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
    except FileNotFoundError:
        raise CommandError("no bash on PATH; the build script needs it") from None
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("hip/build.sh: ")]
    if ours:
        raise CommandError(ours[-1].removeprefix("hip/build.sh: "))
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.I)] or lines[-1:]
    variable = ARCHITECTURES.get(backend)
    again = " ".join(["bash", str(script), backend, *choice, "/tmp/out.so"])
    if variable and environ[variable]:
        again = f"{variable}='{environ[variable]}' {again}"
    raise CommandError(
        f"the compiler failed: {''.join(errors[:1]) or f'status {done.returncode}'}; "
        f"`{again}` shows all that it says"
    )


def _try(file: Path, backend: str) -> str:
    """Loads a library in another process and asks it what it is, or looks at the file where
    this machine lacks what loading takes. Raises CommandError where it is of no use."""
    try:
        archs = check_file(file, backend)
    except native.LibraryError as error:
        raise CommandError(f"what was built is of no use: {_about(error, file)}") from None
    if backend == "hip" and torch_backend()[0] != "hip":
        return f"{archs}; not loaded, which takes a ROCm build of torch"
    steps = ["torch", "library"] if backend == "hip" else ["library"]
    found = probe(steps, backend, file)
    if "error" in found["library"]:
        error = _about(found["library"]["error"], file)
        raise CommandError(f"what was built does not load: {error}")
    return f"loads, ABI version {found['library']['abi']}, {found['library']['architectures']}"


def _tell_pip(files: list[Path]) -> None:
    """Enters files of an installed wheel into its list, so that `pip uninstall` removes them."""
    site_packages = PACKAGE.parent
    names = [file.relative_to(site_packages).as_posix() for file in files]
    for record in site_packages.glob("expert_cache_shim-*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf-8").splitlines()
        others = [line for line in lines if line.split(",", 1)[0] not in names]
        record.write_text("\n".join([*others, *(f"{name},," for name in names)]) + "\n")


def _about(error: object, file: Path) -> str:
    """An error without the name of the file, which is a temporary one."""
    return str(error).removeprefix(f"{file}: ")
