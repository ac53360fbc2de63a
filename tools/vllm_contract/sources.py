"""Where the sources of a release come from: a folder of unpacked wheels, or the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from expert_cache_shim.versions import OLDEST_TRIED

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = ("vllm/",)
# What the facts are read from: about 2 MB of a wheel of 250 to 400 MB.
SELECTION = (
    "vllm/__init__.py",
    "vllm/_version.py",
    "vllm/config/",
    "vllm/distributed/parallel_state.py",
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/cli/serve.py",
    "vllm/entrypoints/serve/instrumentator/",
    "vllm/model_executor/custom_op.py",
    "vllm/model_executor/layers/attention/",
    "vllm/model_executor/layers/attention_layer_base.py",
    "vllm/model_executor/layers/fused_moe/",
    "vllm/model_executor/layers/quantization/",
    "vllm/model_executor/model_loader/",
    "vllm/model_executor/offloader/",
    "vllm/model_executor/utils.py",
    "vllm/utils/argparse_utils.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/metrics/",
    "vllm/v1/spec_decode/",
    "vllm/v1/utils.py",
    "vllm/v1/worker/",
    "vllm/version.py",
)


class SourcesError(Exception):
    """The sources of a release are not to be had."""


def selected(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.endswith(".py") and name.startswith(prefixes)


def mark_complete(folder: Path, everything: bool) -> None:
    (folder / ".complete").write_text(_contents(everything))


def _contents(everything: bool) -> str:
    return "\n".join(EVERYTHING if everything else SELECTION)


def is_complete(folder: Path, everything: bool) -> bool:
    """Whether an earlier run has unpacked at least what is wanted now."""
    mark = folder / ".complete"
    enough = {_contents(True), _contents(everything)}
    return mark.exists() and mark.read_text() in enough


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "expert-cache-shim" / "vllm-sources"


def release(version: str) -> tuple[int, ...]:
    """A version for comparing, "0.25.1" as (0, 25, 1); a suffix does not count."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def listed() -> list[str]:
    """The releases on the index from OLDEST_TRIED on, in order. Raises SourcesError."""
    found = json.loads(_fetch("list"))
    versions = sorted(found, key=release)
    wanted = [version for version in versions if release(version) >= release(OLDEST_TRIED)]
    if not wanted:
        raise SourcesError("the package index has no wheel of vLLM for this machine")
    return wanted


def fetched(
    version: str, cache: Path, everything: bool = False, whole_wheels: bool = False
) -> Path:
    """The folder with a release's sources, transferred unless they are there. Raises
    SourcesError."""
    folder = cache / version
    if not is_complete(folder, everything):
        flags = ["--everything"] * everything + ["--whole-wheels"] * whole_wheels
        _fetch(*flags, "get", str(cache), version)
    return folder


def _fetch(*arguments: str) -> str:
    command = [sys.executable, "-m", "tools.vllm_contract.fetch", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SourcesError(f"cannot read the package index: {said[-1]}")
    return done.stdout


def unpacked(folder: Path) -> dict[str, Path]:
    """The releases in a folder that holds unpacked wheels, or is one. Raises SourcesError."""
    found = {}
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        version = place / "vllm" / "_version.py"
        if version.exists():
            found[_version_in(version)] = place
    if not found:
        raise SourcesError(f"{folder} holds no unpacked wheel of vLLM (no vllm/_version.py)")
    return dict(sorted(found.items(), key=lambda item: release(item[0])))


def _version_in(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("__version__ = "):
            return line.split("=")[-1].strip().strip("'\"").split("+")[0]
    raise SourcesError(f"{path} does not say which version it is")
