"""A layer of an expert-parallel rank: its ids are those of all ranks, its kernel maps them.

Synthetic layers, as in `test_layer.py`. Ids go on being mapped by the layer's own map, also on
the device tensors; that they are mapped to the right rows shows in the output.
"""

from __future__ import annotations

import pytest
import torch
from synthetic import Model, RoutedExperts, call, kernels, load, marlin_methods, methods
from synthetic.checks import counters, loaded_layer, step, steps

pytest_plugins = ["synthetic.fixtures"]

E = 8  # experts of a rank, of which three are resident
RANKS = 2
STORAGES = ("virtual", "plain")


def ids_of(rank: int, placement: str) -> torch.Tensor:
    """The ids whose experts a rank has, in the order of its experts."""
    ids = torch.arange(RANKS * E)
    return ids[rank * E : (rank + 1) * E] if placement == "linear" else ids[rank::RANKS]


def map_of(rank: int, placement: str) -> torch.Tensor:
    expert_map = torch.full((RANKS * E,), -1, dtype=torch.int32)
    expert_map[ids_of(rank, placement)] = torch.arange(E, dtype=torch.int32)
    return expert_map


METHODS = [
    (methods.UnquantizedFusedMoEMethod, STORAGES),
    (methods.Int8ChannelMoEMethod, STORAGES),
    (methods.WNA16MoEMethod, STORAGES),
    (marlin_methods.MarlinMoEMethod, STORAGES),
    (methods.Fp8CutlassMoEMethod, STORAGES[:1]),
    (methods.Fp8FallbackMoEMethod, STORAGES[:1]),
    (methods.QuarkW8A8Int8MoEMethod, STORAGES[:1]),
]


# --- Output ---------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["linear", "round robin"])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("method", "storage"), [(m, s) for m, kinds in METHODS for s in kinds])
def test_the_output_is_bit_for_bit_the_uncached_one(pair, method, storage, rank, placement):
    uncached, cached, armed = pair(method, storage, expert_map=map_of(rank, placement))
    for inputs in steps(uncached, 40):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    counted = counters(armed)
    assert counted["steps"] + counted["idle"] == 40
    assert min(counted[name] for name in ("hits", "misses", "evictions", "overflow")) > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_the_ranks_together_compute_what_one_layer_with_all_experts_does(arm, settings, storage):
    settings(storage=storage)
    whole = loaded_layer(experts=RANKS * E)
    ranks = [RoutedExperts(expert_map=map_of(rank, "round robin")) for rank in range(RANKS)]
    for rank, layer in enumerate(ranks):
        for name in ("w13_weight", "w2_weight"):
            share = getattr(whole, name)[ids_of(rank, "round robin")]
            setattr(layer, name, methods.parameter(share))
    model = load(Model(*ranks))
    assert len(arm(model).armed) == RANKS
    for inputs in steps(whole, 20):
        total = sum(call(layer, *inputs) for layer in ranks)
        torch.testing.assert_close(total, call(whole, *inputs))


def test_rows_in_place_of_ids_would_show(pair):
    """The control: ids that the map does not take to the rows give another output."""
    uncached, cached, armed = pair(expert_map=map_of(1, "linear"))
    manage = armed.cache.library.manage

    def give_rows(args, stream=0):
        args.expert_ids = args.state + 4 * 8  # row_of, for one
        manage(args, stream)

    armed.cache.library.manage = give_rows
    differs = [
        not torch.equal(call(cached, *inputs), call(uncached, *inputs))
        for inputs in steps(uncached, 20)
    ]
    assert any(differs)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_kernel_sees_the_map_of_the_layer_and_ids_of_the_same_ranks(pair, storage):
    seen = []

    class Noting(methods.UnquantizedFusedMoEMethod):
        def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
            seen.append((layer.expert_map, topk_ids))
            return super().apply(layer, x, topk_weights, topk_ids, None, None)

    expert_map = map_of(1, "round robin")
    _, cached, _ = pair(Noting, storage, expert_map=expert_map)
    for inputs in steps(cached, 10):
        call(cached, *inputs)
        handed, new_ids = seen.pop()
        assert handed is expert_map
        here = expert_map[inputs[2].long()] >= 0
        assert torch.equal(expert_map[new_ids.long()] >= 0, here)
        assert torch.equal(new_ids[~here], inputs[2][~here])
        assert new_ids.dtype == inputs[2].dtype


# --- Ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("storage", STORAGES)
def test_ids_of_a_padded_or_a_shared_column_are_passed_on(pair, storage, dtype):
    """-1 where a token is padding, and beyond all experts where a shared one has a column."""
    uncached, cached, armed = pair(storage=storage, expert_map=map_of(0, "linear"), top_k=3)
    for x, weights, ids in steps(uncached, 20, dtype):
        ids[:, -1] = RANKS * E
        ids[::2, 0] = -1
        assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
    assert counters(armed)["hits"] > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_ids_in_a_slice_of_a_buffer_that_lives_on_are_not_written(pair, storage):
    uncached, cached, _ = pair(storage=storage, expert_map=map_of(0, "round robin"))
    for x, weights, ids in steps(uncached, 20):
        buffer = torch.full((64, 4), 5, dtype=torch.int32)
        buffer[: len(ids), :2] = ids
        before = buffer.clone()
        out = call(cached, x, weights, buffer[: len(ids), :2])
        assert torch.equal(out, call(uncached, x, weights, ids))
        assert torch.equal(buffer, before)


def test_steps_without_an_expert_of_this_rank_count_as_idle_and_change_nothing(pair):
    uncached, cached, armed = pair(expert_map=map_of(0, "linear"))
    x, weights, ids = step(uncached, tokens=4)
    state = armed.cache.state.clone()
    for elsewhere in (torch.full_like(ids, -1), torch.full_like(ids, E), ids % E + E):
        assert torch.equal(call(cached, x, weights, elsewhere), torch.zeros_like(x))
    assert torch.equal(armed.cache.state, state)
    assert counters(armed)["idle"] == 3
    assert call(cached, x[:0], weights[:0], ids[:0]).shape == (0, x.shape[1])
    assert counters(armed)["idle"] == 3


# --- Sleep ----------------------------------------------------------------------------------


def test_the_maps_come_back_from_a_deep_sleep(pair):
    uncached, cached, armed = pair(expert_map=map_of(1, "round robin"))
    kept = armed.cache._maps
    lost = kept.clone()
    kept.random_(-1, 99)
    assert not torch.equal(kept, lost)
    armed.cache.restore()
    for inputs in steps(uncached, 10):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))


# --- Refusals -------------------------------------------------------------------------------


def model_with(experts: type[kernels.FusedMoEExperts], expert_map: torch.Tensor) -> Model:
    class Method(methods.UnquantizedFusedMoEMethod):
        def make_experts(self, layer):
            return experts(self.moe, self.moe_quant_config)

    return load(Model(RoutedExperts(Method, expert_map=expert_map)))


def test_a_kernel_that_ignores_the_map(refused):
    reason, remedy = refused(model_with(kernels.CPUUnquantizedExperts, map_of(0, "linear")))
    assert reason.startswith("CPUUnquantizedExperts is not known to look ids up in")
    assert remedy == "serve without --enable-expert-parallel"


def test_a_mask_in_place_of_the_map(refused, monkeypatch):
    """0.21 hands AITER's mask to every kernel of a process that has AITER on."""
    monkeypatch.setattr(RoutedExperts, "_kernel_wants_mask", lambda layer: True)
    reason, _ = refused(model_with(kernels.TritonExperts, map_of(0, "linear")))
    assert reason.startswith("TritonExperts is not known to look ids up in")


@pytest.mark.parametrize("broken", [[0, 1], [7, 7]], ids=["missing", "twice"])
def test_a_map_without_an_id_for_each_expert(refused, broken):
    expert_map = map_of(0, "linear")
    expert_map[:2] = torch.tensor(broken) - 1
    reason, remedy = refused(model_with(kernels.TritonExperts, expert_map))
    assert "ids to 8 experts; it must take one to each" in reason
    assert "--enable-expert-parallel" in remedy


def test_ids_that_move_between_ranks_after_the_cache(refused):
    model = model_with(kernels.TritonExperts, map_of(0, "linear"))
    method = model.routed[0].quant_method
    method.moe_kernel.impl.prepare_finalize = kernels.MoEPrepareAndFinalizeNaiveDPEPModular()
    reason, remedy = refused(model)
    assert reason.startswith("MoEPrepareAndFinalizeNaiveDPEPModular moves routing ids")
    assert "without all2all" in remedy
