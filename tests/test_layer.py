"""The output of an armed layer, bit for bit, whatever its weights and its routing ids."""

from __future__ import annotations

import contextlib

import pytest
import torch
from synthetic import Model, RoutedExperts, call, kernels, load, marlin_methods, methods, tuning
from synthetic.checks import counters, step, steps

from expert_cache_shim import layer as layer_module
from expert_cache_shim.native import STATE_HEADER

pytest_plugins = ["synthetic.fixtures"]

E = 8  # experts of the layers, of which three are resident
STORAGES = ("virtual", "plain")
METHODS = [
    methods.UnquantizedFusedMoEMethod,
    methods.Bfloat16MoEMethod,
    methods.Int8ChannelMoEMethod,
    methods.Fp8BlockMoEMethod,
    methods.Fp8TensorMoEMethod,
    methods.WNA16MoEMethod,
    marlin_methods.MarlinMoEMethod,
]
# Kernels that plain storage does not serve, since they may need as many rows as experts.
FULL_SIZE_METHODS = [
    methods.Fp8CutlassMoEMethod,
    methods.Fp8FallbackMoEMethod,
    methods.QuarkW8A8Int8MoEMethod,
    methods.CompressedTensorsWNA16MoEMethod,
    methods.MoeWNA16Method,
]


# --- Output ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "storage"),
    [(m, s) for m in METHODS for s in STORAGES] + [(m, "virtual") for m in FULL_SIZE_METHODS],
)
def test_the_output_is_bit_for_bit_the_uncached_one(pair, method, storage):
    uncached, cached, armed = pair(method, storage)
    for inputs in steps(uncached, 40):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    counted = counters(armed)
    assert counted["steps"] == 40
    assert min(counted[name] for name in ("hits", "misses", "evictions", "overflow")) > 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("slots", [1, E - 1])
def test_the_output_is_right_at_the_smallest_and_the_largest_number_of_slots(pair, storage, slots):
    uncached, cached, _ = pair(storage=storage, variables={"slots": slots}, has_bias=True)
    for inputs in steps(uncached, 20):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))


@pytest.mark.parametrize("storage", STORAGES)
def test_layers_that_share_overflow_rows_do_not_disturb_each_other(arm, settings, storage):
    settings(storage=storage)
    uncached, cached = (
        load(Model(*(RoutedExperts(methods.Int8ChannelMoEMethod, seed=n) for n in range(3))))
        for _ in range(2)
    )
    report = arm(cached)
    assert len(report.armed) == 3
    for inputs in steps(uncached.routed[0], 15):
        for one, other in zip(uncached.routed, cached.routed, strict=True):
            assert torch.equal(call(other, *inputs), call(one, *inputs))


def test_a_gap_inside_the_weights_is_kept(pair):
    def padded(weight):
        wide = torch.zeros(*weight.shape[:2], weight.shape[2] + 16)
        wide[..., : weight.shape[2]] = weight
        return methods.parameter(wide[..., : weight.shape[2]])

    class Padded(methods.UnquantizedFusedMoEMethod):
        def process_weights_after_loading(self, layer):
            layer.w13_weight, layer.w2_weight = padded(layer.w13_weight), padded(layer.w2_weight)
            super().process_weights_after_loading(layer)

    uncached, cached, armed = pair(Padded)
    assert not armed.cache.storage.placements[0].slots.is_contiguous()
    for inputs in steps(uncached, 10):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))


# What the comparisons above would see if the cache were wrong.


@pytest.mark.parametrize("method", METHODS)
def test_control_a_wrong_expert_changes_the_output(pair, monkeypatch, method):
    uncached, cached, armed = pair(method)
    run = armed.cache.run

    def confused(ids, *how):
        rows, row_of = run(ids, *how), armed.cache.row_of
        routed = ids.unique()
        row_of[routed] = row_of[routed.flip(0)]  # where the kernel is given experts
        return rows.flip(-1)  # each expert of a token with the weight of the other

    monkeypatch.setattr(armed.cache, "run", confused)
    inputs = step(uncached)
    assert not torch.equal(call(cached, *inputs), call(uncached, *inputs))


@pytest.mark.parametrize("storage", STORAGES)
def test_control_without_the_copies_the_output_is_wrong(pair, library, monkeypatch, storage):
    uncached, cached, _ = pair(storage=storage)
    monkeypatch.setattr(library, "gather", lambda args, stream=0: None)
    inputs = step(uncached)
    assert not torch.equal(call(cached, *inputs), call(uncached, *inputs))


def test_control_another_tuned_configuration_changes_the_output(pair, monkeypatch):
    uncached, cached, _ = pair(storage="plain")
    inputs = step(uncached)
    expected = call(uncached, *inputs)
    monkeypatch.setattr(tuning.package, "get_config", lambda: {"BLOCK_SIZE_K": 16})
    assert not torch.equal(call(cached, *inputs), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_tuned_configuration_is_forced_only_while_the_kernel_runs(pair, fails):
    seen = []

    class Noting(kernels.TritonExperts):
        def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
            seen.append(tuning.package.get_config())
            if fails:
                raise RuntimeError("out of memory")
            return super().apply(hidden_states, w1, w2, topk_weights, topk_ids, expert_map)

    Noting.__name__ = "TritonExperts"  # plain storage serves classes by exact name

    class Method(methods.UnquantizedFusedMoEMethod):
        def make_experts(self, layer):
            return Noting(self.moe, self.moe_quant_config)

    _, cached, _ = pair(Method, storage="plain")
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        call(cached, *step(cached))
    assert seen == [{"BLOCK_SIZE_K": 32}]
    assert tuning.package.get_config() is None


def test_an_override_of_the_tuned_configuration_is_respected_and_left(pair, monkeypatch):
    override = {"BLOCK_SIZE_K": 8}
    monkeypatch.setattr(tuning.package, "get_config", lambda: override)
    uncached, cached, _ = pair(storage="plain")
    inputs = step(uncached)
    assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert tuning.package.get_config() is override


@pytest.mark.parametrize("method", [methods.Fp8TensorMoEMethod, marlin_methods.MarlinMoEMethod])
def test_control_a_small_tensor_left_behind_changes_the_output(pair, method):
    uncached, cached, armed = pair(method)
    for placement in armed.cache.storage.placements:
        if placement.source.label.endswith(("alpha_or_gscale", "g_idx")):
            placement.source.tensor.copy_(placement.source.tensor.flip(0))
    inputs = step(uncached)
    assert not torch.equal(call(cached, *inputs), call(uncached, *inputs))


# --- Ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_ids_may_be_of_any_type_that_vllm_uses(pair, storage, dtype):
    uncached, cached, armed = pair(storage=storage)
    for inputs in steps(uncached, 10, dtype=dtype):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert counters(armed)["steps"] == 10


@pytest.mark.parametrize("storage", STORAGES)
def test_padding_ids_are_passed_on_and_touch_nothing(pair, storage):
    uncached, cached, armed = pair(storage=storage)
    x, weights, ids = step(uncached, 3)
    ids[1] = -1
    ids[2, 0] = -1
    assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
    assert counters(armed)["ids"] == 3
    state = armed.cache.state.clone()
    ids.fill_(-1)
    assert torch.equal(call(cached, x, weights, ids), torch.zeros_like(x))
    assert counters(armed)["idle"] == 1
    assert torch.equal(armed.cache.state[8:], state[8:])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_shared_expert_that_is_one_more_row_and_column_stays_resident(pair, storage):
    """Fused shared experts: the weights have E + 1 rows, the ids k + 1 columns."""
    uncached, cached, armed = pair(storage=storage, experts=E + 1)
    for x, weights, ids in steps(uncached, 20):
        ids = torch.cat((ids % E, torch.full((len(ids), 1), E)), 1).to(torch.int32)
        weights = torch.cat((weights, torch.ones(len(ids), 1)), 1)
        assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
        row_of = armed.cache.state[STATE_HEADER : STATE_HEADER + E + 1]
        assert 0 <= row_of[E] < armed.cache.slots


def test_a_step_without_tokens_is_not_counted(pair):
    uncached, cached, armed = pair()
    assert call(cached, *step(uncached, 0)).shape == (0, uncached.hidden)
    assert sum(counters(armed).values()) == 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "part",
    [
        lambda buffer: buffer[:4, 1:3],
        lambda buffer: buffer[:8:2, 2:],
        lambda buffer: buffer[:2, :4].t(),
        lambda buffer: buffer[:1, :2].expand(4, 2),
    ],
    ids=["slice", "every second row", "transposed", "expanded"],
)
def test_ids_that_are_part_of_a_buffer_are_read_by_stride_and_never_written(pair, storage, part):
    uncached, cached, _ = pair(storage=storage)
    x, weights, _ = step(uncached, 4)
    buffer = torch.randint(0, E, (8, 4), generator=torch.Generator().manual_seed(4))
    for dtype in (torch.int32, torch.int64):
        ids, before = part(buffer.to(dtype)), part(buffer.to(dtype)).clone()
        whole = ids._base.clone()
        assert not ids.is_contiguous()
        out = call(cached, x, weights, ids)
        assert torch.equal(ids._base, whole)
        assert torch.equal(out, call(uncached, x, weights, before))


def test_ids_of_one_dimension_are_served(pair, library):
    _, _, armed = pair()
    ids = torch.tensor([3, 1, 3], dtype=torch.int32)
    rows = armed.cache.run(ids, layer_module.ROWS)
    assert rows.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([[1, 2]], dtype=torch.int16), torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32)],
    ids=["type", "number"],
)
def test_ids_that_the_kernel_does_not_take_are_read_through(pair, monkeypatch, ids):
    monkeypatch.setattr(layer_module.policy, "MAX_IDS", 4)
    uncached, cached, armed = pair()
    weights = torch.rand(ids.shape)
    x = step(uncached)[0]
    assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
    assert {k: v for k, v in counters(armed).items() if v} == {"read_through": 1}
