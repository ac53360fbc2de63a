"""The routing that a real engine leaves for `expert-cache trace record`."""

import numpy as np
import pytest
from engine import IN_PROCESS, Job, run, shim, snapshots_of

from expert_cache_shim import trace_ring
from expert_cache_shim.trace_replay import Replay

SLOTS = 16


@pytest.fixture(scope="module")
def recorded(folder, checkpoint, environment):
    """The answer of an engine that records, and its ring."""
    rings = folder / "rings"
    variables = environment(
        **IN_PROCESS, **shim(folder / "trace-snapshots", slots=SLOTS, trace=rings)
    )
    (answer,) = run([Job(checkpoint("qwen3_moe"))], folder / "trace", variables)
    (path,) = rings.glob(f"*{trace_ring.SUFFIX}")
    reader = trace_ring.Reader(path)
    return answer, trace_ring.to_trace(reader.header, [reader.read()])


def test_recording_changes_no_token(recorded, stock):
    answer, _ = recorded
    assert answer["tokens"] == stock["qwen3_moe"]["tokens"]
    assert "the routing of the last" in answer.log


def test_replay_of_what_was_recorded_counts_what_the_kernels_counted(recorded, folder, checkpoint):
    """Every pass and every token is there, and warm-up is not: else the misses would differ."""
    _, found = recorded
    counts = Replay(found, [SLOTS], "lrfu").run()
    (snapshot,) = snapshots_of(folder / "trace-snapshots", checkpoint("qwen3_moe"))
    assert counts.misses.sum() == snapshot.total("misses") > 0
    assert counts.overflow.sum() == snapshot.total("overflow") > 0
    assert found.steps * found.layers == snapshot.total("steps")
    assert np.diff(found.bounds).max() > 8  # prompts, which ran together
