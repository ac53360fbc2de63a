"""A kernel whose sums depend on the order of experts keeps that order."""

from __future__ import annotations

import pytest
import torch
from synthetic import call, marlin
from synthetic.checks import counters, steps

from expert_cache_shim import vllm_compat

pytest_plugins = ["synthetic.fixtures"]

STORAGES = ("virtual", "plain")


E = 8  # experts of a rank
# The expert of this rank that each id of two ranks names: not in the order of ids.
EXPERT_MAP = torch.full((2 * E,), -1, dtype=torch.int32)
EXPERT_MAP[torch.tensor([15, 3, 9, 0, 12, 5, 6, 10])] = torch.arange(E, dtype=torch.int32)
MAPS, MAP_NAMES = (None, EXPERT_MAP), ("one rank", "expert parallel")


def make_awkward(ids: torch.Tensor, of_nobody: int) -> None:
    """Names one expert twice for a token, and nobody for others: padding, or a shared expert."""
    ids[::3, 0] = ids[::3, 1]
    ids[1::3, -1] = -1
    ids[2::3, 0] = of_nobody


def differing(pair, storage: str, expert_map=None) -> tuple[int, dict[str, int]]:
    """Of 40 steps those whose output is another with the cache, and its counters."""
    uncached, cached, armed = pair(
        marlin.OrderedMoEMethod, storage, {"slots": 4}, top_k=3, expert_map=expert_map
    )
    different = 0
    for number, inputs in enumerate(steps(uncached, 40, torch.int64)):
        if number % 2:
            make_awkward(inputs[2], uncached.global_num_experts)
        different += not torch.equal(call(cached, *inputs), call(uncached, *inputs))
    return different, counters(armed)


@pytest.mark.parametrize("expert_map", MAPS, ids=MAP_NAMES)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_output_is_bit_for_bit_the_uncached_one(pair, storage, expert_map):
    different, counted = differing(pair, storage, expert_map)
    assert different == 0
    assert min(counted[name] for name in ("hits", "misses", "evictions", "overflow")) > 0


@pytest.mark.parametrize("expert_map", MAPS, ids=MAP_NAMES)
@pytest.mark.parametrize("storage", STORAGES)
def test_control_the_order_of_rows_rounds_differently(pair, storage, monkeypatch, expert_map):
    monkeypatch.setattr(vllm_compat, "keep_order", lambda experts, row_of: False)
    assert differing(pair, storage, expert_map)[0] > 0


def test_ids_of_no_expert_stay_what_they_are_and_the_function_comes_back(monkeypatch):
    seen = []

    class MarlinExperts:
        def apply(self, ids):
            seen.append(marlin.moe_align_block_size(ids, 1, 4, None, True))
            if len(seen) > 1:
                raise RuntimeError

    MarlinExperts.__module__ = marlin.__name__
    experts, align = MarlinExperts(), marlin.moe_align_block_size
    assert vllm_compat.keep_order(experts, torch.tensor([7, 5, -1, 6], dtype=torch.int32))
    ids = torch.tensor([[3, -1, 0], [1, 9, 3]])
    experts.apply(ids)
    order, rows, count = seen[0]
    assert rows[:count].tolist() == [7, 5, 6, 6] and rows[count:].tolist() == [-1, -1]
    assert torch.equal(order, align(ids, 1, 4, None, True)[0])
    with pytest.raises(RuntimeError):
        experts.apply(ids)
    assert marlin.moe_align_block_size is align


def test_another_kernel_is_left_alone():
    assert not vllm_compat.keep_order(object(), torch.zeros(4, dtype=torch.int32))
