"""How many bytes rows take: the arithmetic that `storage` allocates by and `plan` predicts with.

Numbers only, so that both a worker and a machine without PyTorch can ask.
"""

from __future__ import annotations

# Below this many bytes a record is not worth a page of its own: its tensor is not aliased.
ALIAS_FROM = 64 * 1024

# What the driver and libraries hold on a device beside torch's memory.
CONTEXT = 600 * 2**20


def is_aliased(record_bytes: int, granularity: int) -> bool:
    """Whether a tensor of such records has shared overflow rows in `virtual` storage; else it
    gets a private tensor of every expert. granularity: bytes of the driver's smallest piece."""
    return record_bytes >= min(ALIAS_FROM, granularity)


def aliased_bytes(
    experts: int, slots: int, stride: int, record_bytes: int, granularity: int
) -> tuple[int, int]:
    """Bytes of a layer's own memory and of the memory it shares, for one aliased tensor of
    `experts` records that begin `stride` bytes apart. Both are whole pieces."""
    total = round_up((experts - 1) * stride + record_bytes, granularity)
    private = min(total, round_up(slots * stride, granularity))
    return private, total - private


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
