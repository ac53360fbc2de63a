"""A kernel whose sums depend on the order of experts keeps that order."""

from __future__ import annotations

import pytest
import torch
from synthetic import call, marlin
from synthetic.checks import counters, steps

from expert_cache_shim import vllm_compat

pytest_plugins = ["synthetic.fixtures"]

STORAGES = ("virtual", "plain")


def differing(pair, storage: str) -> tuple[int, dict[str, int]]:
    """Of 40 steps those whose output is another with the cache, and its counters."""
    uncached, cached, armed = pair(marlin.OrderedMoEMethod, storage, {"slots": 4}, top_k=3)
    different = sum(
        not torch.equal(call(cached, *inputs), call(uncached, *inputs))
        for inputs in steps(uncached, 40)
    )
    return different, counters(armed)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_output_is_bit_for_bit_the_uncached_one(pair, storage):
    different, counted = differing(pair, storage)
    assert different == 0
    assert min(counted[name] for name in ("hits", "misses", "evictions", "overflow")) > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_control_the_order_of_rows_rounds_differently(pair, storage, monkeypatch):
    monkeypatch.setattr(vllm_compat, "keep_order", lambda experts, row_of: False)
    assert differing(pair, storage)[0] > 0


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
