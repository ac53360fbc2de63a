"""What this machine has: GPUs, the PyTorch that will drive them, limits on host memory.

Asked of files and of small tools. Nothing here imports PyTorch or opens a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def find_package(name: str) -> Path | None:
    """The folder of an installed package, found without importing it or waking import hooks."""
    spec = PathFinder.find_spec(name)
    if spec is None:  # an editable install has a finder of its own
        try:
            spec = importlib.util.find_spec(name) if name != "vllm" else None
        except (ImportError, ValueError):
            return None
    places = list(getattr(spec, "submodule_search_locations", None) or ())
    return Path(places[0]) if places else None


def torch_backend() -> tuple[str | None, str]:
    """Which kernels the installed PyTorch needs ("hip", "cuda" or "host"), and its version.

    torch/version.py has nothing but constants. (None, "") where there is no PyTorch.
    """
    folder = find_package("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None, ""
    facts = runpy.run_path(str(folder / "version.py"))
    backend = "hip" if facts.get("hip") else "cuda" if facts.get("cuda") else "host"
    return backend, str(facts.get("__version__", ""))


def amd_architectures(
    nodes: Path = KFD, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """What the kernel driver reports of AMD GPUs: ("gfx942",). One name a kind of GPU.

    `gfx_target_version` is major * 10000 + minor * 100 + stepping; a CPU has 0. The runtime
    reports `HSA_OVERRIDE_GFX_VERSION` instead where that is set.
    """
    found = set()
    for properties in nodes.glob("*/properties"):
        try:
            match = re.search(r"^gfx_target_version (\d+)$", properties.read_text(), re.M)
        except OSError:
            continue
        if match and int(match[1]):
            version = int(match[1])
            found.add(_gfx(version // 10000, version // 100 % 100, version % 100))
    override = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", environ.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if found and override:
        found = {_gfx(*map(int, override.groups()))}
    return tuple(sorted(found))


def _gfx(major: int, minor: int, stepping: int) -> str:
    return f"gfx{major}{minor:x}{stepping:x}"


def nvidia_architectures() -> tuple[str, ...]:
    """What nvidia-smi reports: ("sm_90",). One name a kind of GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.findall(r"^\s*(\d+)\.(\d)\s*$", done.stdout, re.M)
    return tuple(sorted({f"sm_{major}{minor}" for major, minor in found}))


def memory_total() -> tuple[int, int]:
    """Bytes of RAM, and how many of them can be had now."""
    text = Path("/proc/meminfo").read_text()
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M))
    return int(kib["MemTotal"]) * 1024, int(kib.get("MemAvailable", kib["MemFree"])) * 1024


def locked_memory_limit() -> int | None:
    """Bytes that this process may pin (`ulimit -l`); None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_memory_limit(
    memberships: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes of the tightest limit of this process's control groups; None where there is none.

    Version 2 keeps it in `memory.max`, version 1 below `memory/` in `memory.limit_in_bytes`,
    which a huge number makes "none". A container may see its own group as the root.
    """
    limits = []
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = top / path.lstrip("/")
        for folder in (top, *(f for f in (here, *here.parents) if top in f.parents)):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text))
    return min(limits, default=None)


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds an existing path: "tmpfs", "ext4"."""
    place, best, kind = path.resolve(), -1, ""
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4]))
        # The last of several mounts on one folder is the one in sight.
        if (mounted == place or mounted in place.parents) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), after.split()[0]
    return kind
