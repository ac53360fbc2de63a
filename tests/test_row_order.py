"""A kernel whose sums depend on the order of experts keeps that order, or is refused."""

from __future__ import annotations

import pytest
import torch
from synthetic import call, marlin, marlin_methods
from synthetic.checks import counters, model_of, steps
from synthetic.marlin import moe_align_block_size

from expert_cache_shim import vllm_compat

pytest_plugins = ["synthetic.fixtures"]

# Each with the storages that serve it.
CASES = [
    (marlin_methods.OrderedMoEMethod, "virtual"),
    (marlin_methods.OrderedMoEMethod, "plain"),
    (marlin_methods.AWQMarlinMoEMethod, "virtual"),
]
every_case = pytest.mark.parametrize(("method", "storage"), CASES)
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


def differing(pair, method, storage: str, expert_map=None) -> tuple[int, dict[str, int]]:
    """Of 40 steps those whose output is another with the cache, and its counters."""
    uncached, cached, armed = pair(method, storage, {"slots": 4}, top_k=3, expert_map=expert_map)
    different = 0
    for number, inputs in enumerate(steps(uncached, 40, torch.int64)):
        if number % 2:
            make_awkward(inputs[2], uncached.global_num_experts)
        different += not torch.equal(call(cached, *inputs), call(uncached, *inputs))
    return different, counters(armed)


@pytest.mark.parametrize("expert_map", MAPS, ids=MAP_NAMES)
@every_case
def test_the_output_is_bit_for_bit_the_uncached_one(pair, method, storage, expert_map):
    different, counted = differing(pair, method, storage, expert_map)
    assert different == 0
    assert min(counted[name] for name in ("hits", "misses", "evictions", "overflow")) > 0


@pytest.mark.parametrize("expert_map", MAPS, ids=MAP_NAMES)
@every_case
def test_control_the_order_of_rows_rounds_differently(
    pair, monkeypatch, method, storage, expert_map
):
    monkeypatch.setattr(vllm_compat, "keep_order", lambda method, row_of: False)
    assert differing(pair, method, storage, expert_map)[0] > 0


@pytest.mark.parametrize("use_marlin", [True, False])
def test_a_method_may_choose_another_function(pair, monkeypatch, use_marlin):
    """Which is then given rows."""
    method = marlin_methods.QuarkW8A8Fp8MoEMethod
    monkeypatch.setattr(method, "use_marlin", use_marlin)
    assert differing(pair, method, "virtual")[0] == 0


# As in the module of Marlin, in which `moe_align_block_size` is a name.
def fused_marlin_moe(ids, results):
    results.append(moe_align_block_size(ids, 1, 4, None, True))
    if len(results) > 1:
        raise RuntimeError


class MarlinExperts:
    def apply(self, ids, results):
        fused_marlin_moe(ids, results)


def test_ids_of_no_expert_stay_what_they_are_and_the_function_comes_back():
    experts, align, results = MarlinExperts(), moe_align_block_size, []
    assert vllm_compat.keep_order(experts, torch.tensor([7, 5, -1, 6], dtype=torch.int32))
    ids = torch.tensor([[3, -1, 0], [1, 9, 3]])
    experts.apply(ids, results)
    order, rows, count = results[0]
    assert rows[:count].tolist() == [7, 5, 6, 6] and rows[count:].tolist() == [-1, -1]
    assert torch.equal(order, align(ids, 1, 4, None, True)[0])
    with pytest.raises(RuntimeError):
        experts.apply(ids, results)
    assert moe_align_block_size is align


def test_another_kernel_is_left_alone():
    assert not vllm_compat.keep_order(object(), torch.zeros(4, dtype=torch.int32))


# --- What cannot be kept is refused ---------------------------------------------------------


class DerivedExperts(marlin.MarlinExperts):
    """May sort in another way."""


class DerivedMoEMethod(marlin_methods.OrderedMoEMethod):
    def make_experts(self, layer):
        return DerivedExperts(self.moe, self.moe_quant_config)


def refused_for_its_order(refused, method, name: str) -> None:
    reason, _ = refused(model_of(method))
    assert reason == f"it is not proven that {name} gives the same result wherever an expert lies"


def test_a_derived_kernel(refused):
    refused_for_its_order(refused, DerivedMoEMethod, "DerivedExperts")


@pytest.mark.parametrize(
    "method, name",
    [
        (marlin_methods.OrderedMoEMethod, "MarlinExperts"),
        (marlin_methods.AWQMarlinMoEMethod, "AWQMarlinMoEMethod"),
        (marlin_methods.QuarkW8A8Fp8MoEMethod, "QuarkW8A8Fp8MoEMethod"),
    ],
)
def test_a_release_in_which_marlin_sorts_in_another_way(refused, arm, monkeypatch, method, name):
    assert arm(model_of(method)).armed
    with monkeypatch.context() as changed:
        changed.delattr(marlin, "moe_align_block_size")
        refused_for_its_order(refused, method, name)
    for module in (marlin, marlin_methods):  # a function of this module that does not name it
        monkeypatch.setattr(module, "fused_marlin_moe", marlin.moe_align_block_size)
    refused_for_its_order(refused, method, name)


def test_an_order_that_a_graph_compiled_on_a_cpu_would_not_keep(refused, monkeypatch):
    monkeypatch.setattr(vllm_compat, "compiles_on_cpu", lambda: True)
    refused_for_its_order(refused, marlin_methods.OrderedMoEMethod, "MarlinExperts")
