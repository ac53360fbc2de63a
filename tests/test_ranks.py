"""Tensor-parallel ranks: equal routing, equal caches, and no message between them.

Each rank is a process of its own, with weights of its own, and has ended before the next one
starts: nothing could pass between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic.rank import COMBINATIONS, LAYERS, STEPS

from expert_cache_shim import policy

ROOT = Path(__file__).parent.parent


def run_rank(out: Path, rank: int, routing_seed: int) -> dict[str, np.ndarray]:
    environ = {name: v for name, v in os.environ.items() if not name.startswith("EXPERT_CACHE_")}
    environ |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": str(rank)}
    command = [sys.executable, "-m", "synthetic.rank", str(rank), str(routing_seed), str(out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


@pytest.fixture(scope="module")
def ranks(host_library_path, tmp_path_factory) -> list[dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("ranks")
    return [run_rank(folder / f"{rank}.npz", rank, routing_seed=0) for rank in range(3)]


@pytest.mark.parametrize("name, storage", COMBINATIONS)
def test_ranks_that_see_the_same_routing_keep_the_same_cache(ranks, name, storage):
    """Every word of the state, which has all that a later step depends on, after every step."""
    first, *others = ranks
    states, counters = (first[f"{name} {storage} {what}"] for what in ("states", "counters"))
    assert states.shape[:2] == counters.shape[:2] == (STEPS, LAYERS)
    for other in others:
        assert np.array_equal(other[f"{name} {storage} states"], states)
        assert np.array_equal(other[f"{name} {storage} counters"], counters)
    counted = dict(zip(policy.COUNTERS, counters[-1, 0]))
    assert min(counted[counter] for counter in ("hits", "misses", "evictions", "overflow")) > 0


def test_each_rank_has_weights_of_its_own(ranks):
    outputs = [rank["output"] for rank in ranks]
    assert not any(np.array_equal(outputs[0], output) for output in outputs[1:])


def test_a_rank_that_sees_another_routing_keeps_another_cache(ranks, tmp_path):
    other = run_rank(tmp_path / "other.npz", 0, routing_seed=1)
    for name, storage in COMBINATIONS:
        states = f"{name} {storage} states"
        assert not np.array_equal(other[states], ranks[0][states])
