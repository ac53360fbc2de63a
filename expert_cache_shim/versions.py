"""Which releases of vLLM the shim was checked against, and what to say about another one."""

from __future__ import annotations

import re
import sys

# Both are set by hand, from what `make contract` found: see docs/compatibility.md.
OLDEST_TRIED = "0.21.0"
NEWEST_TRIED = "0.33.0"

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")


def running() -> str | None:
    """vLLM's own version, None before vLLM is imported. Never that of a distribution named
    vllm: builds for other devices have other names."""
    for name in ("vllm.version", "vllm"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            return version
    return None


def note(version: str | None) -> str | None:
    """What to say about a release that was not tried; None for one that was, or that lies
    between two that were. A version without numbers ("dev") cannot be placed: None too."""
    found = _release(version or "")
    if found is None:
        return None
    if found > _release(NEWEST_TRIED):
        return (
            f"expert cache: vLLM {version} is newer than {NEWEST_TRIED}, the newest that was "
            "tried; its parts are recognised one by one, and what is not is left to vLLM"
        )
    if found < _release(OLDEST_TRIED):
        return (
            f"expert cache: vLLM {version} is older than {OLDEST_TRIED}, the oldest that was "
            "tried; its parts are recognised one by one, and what is not is left to vLLM"
        )
    return None


def minor(version: str) -> tuple[int, int]:
    """(0, 33) for "0.33.1"; for one that cannot be placed that of the newest tried."""
    first, second, *_ = (*(_release(version) or _release(NEWEST_TRIED)), 0)
    return first, second


def _release(version: str) -> tuple[int, ...] | None:
    """The numbers before any suffix, without zeros at the end: "0.33.0rc1+rocm7" is (0, 33). A
    pre-release counts as its release, and so does a build with a local suffix."""
    found = _RELEASE.match(version)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
