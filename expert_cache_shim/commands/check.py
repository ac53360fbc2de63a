"""What `doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line. `warn`: the cache works, or has nothing to do here; `fail`: it cannot work."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def size(count: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} bytes"
