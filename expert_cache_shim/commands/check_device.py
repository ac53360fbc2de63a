"""GPU, kernel library, virtual memory and link, from what the probe found."""

from __future__ import annotations

import os
from pathlib import Path

from .. import native
from ..installation import build_command
from .check import Check, size
from .library_file import check_file, default_file, has_checksum

SLOW_LINK = 6.5  # GB/s; what is below is narrower than 8 lanes of PCIe 4.0, or 16 of 3.0
SEES_GPUS = {
    "cuda": "give the container its GPUs: docker run --gpus all",
    "hip": "give the container its GPUs: docker run --device /dev/kfd --device /dev/dri",
}


def needed_file(backend: str) -> Path:
    """The library that a worker would load."""
    named = os.environ.get("EXPERT_CACHE_LIB", "").strip()
    return Path(named).absolute() if named else default_file(backend)


def check_gpu(backend: str | None, found: dict) -> Check:
    """`backend` is that of the installed PyTorch, `found` what the step "torch" said."""
    if backend is None:
        return Check(
            "gpu", "warn", "not looked for: this Python has no PyTorch",
            "run this with the Python that runs vLLM",
        )  # fmt: skip
    if "error" in found:
        error = f"PyTorch cannot be imported: {found['error']}"
        return Check("gpu", "fail", error, "repair PyTorch; vLLM cannot run without it")
    gpus = found["gpus"]
    if not gpus:
        remedy = SEES_GPUS.get(backend, "the cache serves GPUs; a CPU is for tests")
        return Check("gpu", "warn", f"none that torch {found['version']} sees", remedy)
    kinds = {(g["name"], g["architecture"].split(":")[0], size(g["bytes"])) for g in gpus}
    names = "; ".join(", ".join(kind) for kind in sorted(kinds))
    return Check("gpu", "ok", f"{len(gpus)} x {names} (torch {found['version']})")


def check_kernels(backend: str, file: Path, found: dict) -> Check:
    """The library that a worker would load; `found` is what the step "library" said."""
    if backend == "host" and not file.exists() and not _cpu_allowed():
        return Check("kernels", "ok", "none needed: there is no PyTorch for a GPU")
    unfit = found.get("unfit", "")
    build = _build(backend, unfit)
    try:
        archs = check_file(file, backend)
    except native.LibraryError as error:
        return Check("kernels", "fail", _without_remedy(error), build)
    except OSError as error:
        return Check("kernels", "fail", f"{file}: {error.strerror}", build)
    if "error" in found:
        text = _without_remedy(found["error"])
        return Check("kernels", "fail", text if str(file) in text else f"{file}: {text}", build)
    if unfit:
        return Check("kernels", "fail", _without_remedy(unfit), build)
    archs = found["architectures"] or archs
    facts = [f"{file}: {backend}", f"ABI version {found['abi']}", archs]
    facts += ["checksum matches"] if has_checksum(file) else []
    return Check("kernels", "ok", ", ".join(filter(None, facts)))


def check_other_kernels(needed: Path) -> list[Check]:
    """Libraries of the package that this PyTorch has no use for: whole files, at least."""
    checks = []
    for backend in native.BACKENDS:
        file = default_file(backend)
        if file == needed or not file.exists():
            continue
        try:
            archs = check_file(file, backend)
        except native.LibraryError as error:
            text, build = _without_remedy(error), _build(backend)
            checks.append(Check("kernels", "fail", text, build))
            continue
        facts = [f"{file.name}: whole", archs, "checksum matches" if has_checksum(file) else ""]
        checks.append(Check("kernels", "ok", ", ".join(filter(None, [*facts, "not needed here"]))))
    return checks


def check_virtual_memory(backend: str, found: dict) -> Check:
    """Whether memory can be aliased, as wide steps want it; `found`: the step "virtual"."""
    if "error" not in found:
        pieces = f"pieces of {size(found['granularity'])}"
        return Check("virtual memory", "ok", f"one memory was read through two ranges, {pieces}")
    return Check(
        "virtual memory", "warn", found["error"],
        "nothing to do: plain storage serves the same results, and copies more in wide steps",
    )  # fmt: skip


def check_link(found: dict) -> Check:
    """`found`: the step "link"."""
    if "error" in found:
        return Check(
            "link", "warn", f"not measured: {found['error']}",
            "free memory on host and GPU, and check the limit of pinned memory",
        )  # fmt: skip
    rate = found["bytes"] / found["seconds"] / 1e9
    text = f"{rate:.1f} GB/s from pinned host memory to GPU 0 ({size(found['bytes'])})"
    if rate < SLOW_LINK:
        return Check(
            "link", "warn", f"{text}, which is slow",
            "look for fewer PCIe lanes than the GPU has (`lspci -vv`, LnkSta), or another load",
        )  # fmt: skip
    return Check("link", "ok", text)


def _cpu_allowed() -> bool:
    return os.environ.get("EXPERT_CACHE_ALLOW_CPU", "").strip() == "1"


def _build(backend: str, unfit: str = "") -> str:
    architecture = unfit.split("for this GPU, ")[1].split(";")[0] if unfit else ""
    elsewhere = os.environ.get("EXPERT_CACHE_LIB", "").strip()
    unset = " and unset EXPERT_CACHE_LIB" if elsewhere else ""
    return f"run `{build_command(backend, architecture)}`{unset}"


def _without_remedy(error: object) -> str:
    """What a LibraryError found; `doctor` puts the remedy below it."""
    found, _, remedy = str(error).rpartition("; ")
    return found if found and remedy.startswith(("run ", "build ", "copy ")) else str(error)
