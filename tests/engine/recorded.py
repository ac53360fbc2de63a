"""The routing that an engine recorded: read, and held against what the kernels counted."""

from pathlib import Path

from expert_cache_shim import trace_ring
from expert_cache_shim.telemetry import Snapshot
from expert_cache_shim.trace import Trace
from expert_cache_shim.trace_replay import Replay


def read_trace(rings: Path) -> Trace:
    """Of the one process that left a ring in this folder."""
    (path,) = rings.glob(f"*{trace_ring.SUFFIX}")
    reader = trace_ring.Reader(path)
    return trace_ring.to_trace(reader.header, [reader.read()])


def check_replay_counts_alike(trace: Trace, snapshot: Snapshot, slots: int) -> None:
    """That every pass and every token is there, and warm-up is not: else the misses would
    differ."""
    counts = Replay(trace, [slots], "lrfu").run()
    assert counts.misses.sum() == snapshot.total("misses") > 0
    assert counts.overflow.sum() == snapshot.total("overflow") > 0
    assert trace.steps * trace.layers == snapshot.total("steps")
