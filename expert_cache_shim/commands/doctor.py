"""`doctor`: what is there, what is in the way, and what to do about it, on one screen."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from .. import __version__
from . import Option, check_device, check_host, check_offload, check_start
from .check import Check
from .machine import torch_backend
from .probe import probe

COLORS = {"ok": "32", "warn": "33", "fail": "31"}
NAME_WIDTH = 14


def doctor(
    command: Annotated[
        list[str],
        Option("COMMAND", "After `--`: a `vllm serve` command line, to be checked as well."),
    ] = (),
    build: Annotated[
        bool,
        Option(
            "--build",
            "Only what the build of an image can check. Says nothing unless something is wrong.",
        ),
    ] = False,
    as_json: Annotated[bool, Option("--json", "Everything as JSON.")] = False,
) -> int:
    """Check the installation and this machine; status 1 if the cache cannot work."""
    checks = checks_of_image() if build else checks_of_machine(command)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        report = {
            "version": __version__, "passed": not failed, "checks": [asdict(c) for c in checks]
        }  # fmt: skip
        print(json.dumps(report, indent=2))
        return int(failed)
    for check in checks:
        if not build or check.status != "ok":
            print("\n".join(_lines(check)))
    if not build:
        print(_summary(checks))
    return int(failed)


def checks_of_image() -> list[Check]:
    backend, _ = torch_backend()
    needed = backend or "host"
    file = check_device.needed_file(needed)
    found = probe([*(["torch"] if backend else []), "shim", "library"], needed, file)
    # The GPUs are not here yet; a PyTorch that cannot be imported will not see them there.
    gpu = check_device.check_gpu(backend, found["torch"]) if backend else None
    return [
        check_start.check_files(),
        check_start.check_imports(found["shim"]),
        check_start.check_hook_in_child(),
        *([gpu] if gpu and gpu.status == "fail" else []),
        check_device.check_kernels(needed, file, found["library"]),
        *check_device.check_other_kernels(file),
    ]


def checks_of_machine(command: Sequence[str] = ()) -> list[Check]:
    """command: `vllm serve …`, whose options are checked too."""
    words = check_offload.serve_words(list(command)) if command else []
    backend, _ = torch_backend()
    needed = backend or "host"
    file = check_device.needed_file(needed)
    version = check_start.vllm_version()
    steps = ["torch", "shim", "library", "virtual"]
    steps += ["link"] if needed != "host" else []
    steps += ["vllm"] if version == "" else []
    steps += ["arguments"] if words and version is not None else []
    found = probe(steps, needed, file, words)
    has_gpu = bool(found["torch"].get("gpus"))
    checks = [
        check_start.check_python(),
        check_start.check_vllm(version or found.get("vllm", {}).get("version", version)),
        check_start.check_files(),
        check_start.check_imports(found["shim"]),
        check_start.check_hook(),
        *check_host.check_settings(),
        check_device.check_gpu(backend, found["torch"]),
        check_device.check_kernels(needed, file, found["library"]),
        *check_device.check_other_kernels(file),
    ]
    if "error" not in found["library"] and backend and (has_gpu or needed == "host"):
        checks.append(check_device.check_virtual_memory(needed, found["virtual"]))
    if has_gpu:
        checks.append(check_device.check_link(found["link"]))
    checks += [
        check_host.check_memory(),
        check_host.check_pinned_memory(found["link"] if has_gpu else None),
        check_host.check_shared_memory(),
        check_host.check_counters(os.environ.get("EXPERT_CACHE_SNAPSHOT", "").strip() or None),
    ]
    if words:
        checks += check_offload.check_arguments(found.get("arguments", {}), version)
    return checks


def _lines(check: Check) -> list[str]:
    """Status, name and finding, the remedy below, wrapped to the terminal."""
    width = max(60, shutil.get_terminal_size().columns)
    indent = " " * (6 + NAME_WIDTH + 1)
    label = f"{check.status:<5} {check.name:<{NAME_WIDTH}} "
    how = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(label + check.found, width, **how)
    if check.remedy:
        lines += textwrap.wrap(f"{indent}-> {check.remedy}", width, **how)
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        color = f"\033[{COLORS[check.status]}m{check.status}\033[0m"
        lines[0] = color + lines[0][len(check.status) :]
    return lines


def _summary(checks: list[Check]) -> str:
    counts = {
        status: sum(check.status == status for check in checks) for status in ("fail", "warn")
    }
    words = [f"{count} {status}" for status, count in counts.items() if count]
    return ", ".join(words) if words else "all ok"
