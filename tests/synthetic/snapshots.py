"""Descriptions of layers, as `arming` leaves them in a snapshot."""

from __future__ import annotations

from typing import Any


def described(name: str, **changed: Any) -> dict[str, Any]:
    """One layer's entry in a snapshot's header."""
    return {
        "name": name, "experts": 8, "slots": 3, "record_bytes": 1000, "tensors": 2,
        "storage": "virtual", "private_bytes": 3000, "shared_bytes": 5000, **changed,
    }  # fmt: skip
