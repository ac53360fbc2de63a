"""An armed layer in its steps: its output, its ids, its counters, and what it leaves alone."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from synthetic import Model, RoutedExperts, call, configs, kernels, load, methods, routing, tuning

from expert_cache_shim import layer as layer_module
from expert_cache_shim import native, policy, telemetry

pytest_plugins = ["synthetic.fixtures"]

E, S = 8, 3
NARROW, WIDE = 1, 9  # tokens whose ids fit into the slots, tokens whose ids do not
STORAGES = ("virtual", "plain")
METHODS = [
    methods.UnquantizedFusedMoEMethod,
    methods.Bfloat16MoEMethod,
    methods.Int8ChannelMoEMethod,
    methods.Fp8BlockMoEMethod,
    methods.Fp8TensorMoEMethod,
    methods.WNA16MoEMethod,
    methods.MarlinMoEMethod,
]
# Kernels that plain storage does not serve, since they may need as many rows as experts.
FULL_SIZE_METHODS = [
    methods.Fp8CutlassMoEMethod,
    methods.Fp8FallbackMoEMethod,
    methods.LegacyMoEMethod,
    methods.LazyLegacyMoEMethod,
    methods.LayerReadingMoEMethod,
]


def loaded(method=methods.UnquantizedFusedMoEMethod, **options):
    return load(Model(RoutedExperts(method, seed=1, **options))).routed[0]


@pytest.fixture
def pair(arm, settings):
    """Two equal layers, one of them armed: `(uncached, cached, its ArmedLayer)`."""

    def make(method=methods.UnquantizedFusedMoEMethod, storage="virtual", variables=None, **options):
        settings(storage=storage, **(variables or {}))
        uncached, cached = loaded(method, **options), loaded(method, **options)
        make.model = Model(cached)  # reports live as long as their model
        report = arm(make.model)
        assert [str(refusal) for _, refusal in report.refused] == []
        return uncached, cached, report.armed[0]

    return make


def steps(layer, count, seed=0, dtype=torch.int32):
    """Random routing, mostly of a few tokens, at times wide."""
    random = torch.Generator().manual_seed(seed)
    widths = torch.tensor([1, 1, 1, 2, 4, WIDE])
    for _ in range(count):
        tokens = int(widths[torch.randint(len(widths), (1,), generator=random)])
        yield routing(layer, tokens, random, dtype)


def step(layer, tokens=1, seed=0, dtype=torch.int32):
    return routing(layer, tokens, torch.Generator().manual_seed(seed), dtype)


def counters(armed) -> dict[str, int]:
    return dict(zip(policy.COUNTERS, armed.cache.counters.tolist(), strict=True))


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

    def confused(ids, mode):
        rows = run(ids, mode)
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
    monkeypatch.setattr(tuning.package, "_config", {"BLOCK_SIZE_K": 16})
    assert not torch.equal(call(cached, *inputs), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_tuned_configuration_is_forced_only_while_the_kernel_runs(pair, fails):
    seen = []

    class Noting(kernels.TritonExperts):
        def apply(self, hidden_states, w1, w2, topk_weights, topk_ids):
            seen.append(tuning.package._config)
            if fails:
                raise RuntimeError("out of memory")
            return super().apply(hidden_states, w1, w2, topk_weights, topk_ids)

    class Method(methods.UnquantizedFusedMoEMethod):
        def make_experts(self, layer):
            return Noting(self.moe, self.moe_quant_config)

    _, cached, _ = pair(Method, storage="plain")
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        call(cached, *step(cached))
    assert seen == [{"BLOCK_SIZE_K": 32}]
    assert tuning.package._config is None


def test_an_override_of_the_tuned_configuration_is_respected_and_left(pair, monkeypatch):
    override = {"BLOCK_SIZE_K": 8}
    monkeypatch.setattr(tuning.package, "_config", override)
    uncached, cached, _ = pair(storage="plain")
    inputs = step(uncached)
    assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert tuning.package._config is override


@pytest.mark.parametrize("method", [methods.Fp8TensorMoEMethod, methods.MarlinMoEMethod])
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
    monkeypatch.setattr(layer_module, "MAX_IDS", 4)
    uncached, cached, armed = pair()
    weights = torch.rand(ids.shape)
    x = step(uncached)[0]
    assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
    assert {k: v for k, v in counters(armed).items() if v} == {"read_through": 1}


# --- How it is called -----------------------------------------------------------------------


def test_arguments_may_be_positional_by_name_or_mixed(pair):
    uncached, cached, armed = pair()
    x, weights, ids = step(uncached)
    expected = call(uncached, x, weights, ids)
    apply = cached.quant_method.apply
    rest = {"shared_experts": None, "shared_experts_input": None}
    assert torch.equal(apply(cached, x, weights, ids, None, None), expected)
    assert torch.equal(apply(cached, x, weights, topk_ids=ids, **rest), expected)
    assert torch.equal(apply(topk_ids=ids, x=x, layer=cached, topk_weights=weights, **rest), expected)
    assert counters(armed)["steps"] == 3


@pytest.mark.parametrize("by_name", [True, False])
def test_the_signature_without_shared_experts_is_kept(pair, by_name):
    uncached, cached, armed = pair(methods.OldSignatureMoEMethod)
    x, weights, ids = step(uncached)

    def run(layer):
        arguments = {"layer": layer, "x": x, "topk_weights": weights, "topk_ids": ids}
        arguments["shared_experts_input"] = None
        if by_name:
            return layer.quant_method.apply(**arguments)
        return layer.quant_method.apply(*arguments.values())

    assert torch.equal(run(cached), run(uncached))
    assert counters(armed)["steps"] == 1


def test_a_positional_call_whose_arguments_have_no_names_is_served_as_vllm_would(pair):
    class Gathering(methods.UnquantizedFusedMoEMethod):
        def apply(self, layer, x, *others):
            return super().apply(layer, x, *others)

    uncached, cached, _ = pair(Gathering)
    x, weights, ids = step(uncached)
    out = cached.quant_method.apply(cached, x, weights, ids, None, None)
    assert torch.equal(out, uncached.quant_method.apply(uncached, x, weights, ids, None, None))


def test_shared_experts_reach_the_kernel_as_they_came(pair):
    seen = []

    class Noting(methods.Int8ChannelMoEMethod):
        def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
            seen.append((shared_experts, shared_experts_input))
            return super().apply(layer, x, topk_weights, topk_ids, None, None)

    _, cached, _ = pair(Noting)
    x, weights, ids = step(cached)
    shared, shared_input = object(), torch.ones(1)
    cached.quant_method.apply(
        layer=cached, x=x, topk_weights=weights, topk_ids=ids,
        shared_experts=shared, shared_experts_input=shared_input,
    )  # fmt: skip
    assert seen[0][0] is shared
    assert seen[0][1] is shared_input


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("by_name", [True, False])
def test_one_quant_method_of_two_layers_serves_each_from_its_own_cache(
    arm, settings, storage, by_name
):
    def pair_of_layers():
        first = RoutedExperts(seed=1)
        return load(Model(first, RoutedExperts(seed=2, quant_method=first.quant_method)))

    def run(layer, x, weights, ids):
        if by_name:
            return call(layer, x, weights, ids)
        return layer.quant_method.apply(layer, x, weights, ids, None, None)

    settings(storage=storage)
    uncached, cached = pair_of_layers(), pair_of_layers()
    assert cached.routed[0].quant_method is cached.routed[1].quant_method
    report = arm(cached)
    for inputs in steps(uncached.routed[0], 15):
        for one, other in zip(uncached.routed, cached.routed, strict=True):
            assert torch.equal(run(other, *inputs), run(one, *inputs))
    assert [counters(armed)["steps"] for armed in report.armed] == [15, 15]


def test_a_layer_that_is_not_armed_can_share_the_quant_method(pair):
    uncached, cached, armed = pair()
    other = RoutedExperts(seed=2, quant_method=cached.quant_method)
    inputs = step(other)
    expected = RoutedExperts(seed=2, quant_method=uncached.quant_method)
    assert torch.equal(call(other, *inputs), call(expected, *inputs))
    assert counters(armed)["steps"] == 0


# --- Kernels that cannot be launched, and graphs ----------------------------------------------


@pytest.mark.parametrize("kernel", ["manage", "gather"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_whose_kernel_cannot_be_launched_is_served_by_vllm_from_then_on(
    pair, library, monkeypatch, caplog, kernel, storage
):
    uncached, cached, armed = pair(storage=storage)
    inputs = list(steps(uncached, 10))
    for x in inputs[:5]:
        call(cached, *x)

    def fail(args, stream=0):
        raise native.KernelError(f"expert_cache_{kernel}", 719, "unspecified launch failure")

    monkeypatch.setattr(library, kernel, fail)
    counted = armed.cache.calls()
    for x in inputs:
        assert torch.equal(call(cached, *x), call(uncached, *x))
    assert "apply" not in vars(cached.quant_method)
    assert armed.cache.calls() <= counted + 1
    (message,) = caplog.messages
    assert armed.name in message
    assert "unspecified launch failure" in message


def test_when_one_of_two_layers_with_one_quant_method_gives_up_both_are_right(
    arm, library, monkeypatch
):
    def pair_of_layers():
        first = RoutedExperts(seed=1)
        return load(Model(first, RoutedExperts(seed=2, quant_method=first.quant_method)))

    uncached, cached = pair_of_layers(), pair_of_layers()
    report = arm(cached)
    manage, broken = library.manage, report.armed[0].cache.state.data_ptr()

    def fail(args, stream=0):
        if args.state == broken:
            raise native.KernelError("expert_cache_manage", 719, "unspecified launch failure")
        return manage(args, stream)

    monkeypatch.setattr(library, "manage", fail)
    for inputs in steps(uncached.routed[0], 6):
        for one, other in zip(uncached.routed, cached.routed, strict=True):
            assert torch.equal(call(other, *inputs), call(one, *inputs))


def test_a_step_inside_a_graph_uses_rows_whatever_its_width(pair, monkeypatch):
    uncached, cached, armed = pair()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for inputs in steps(uncached, 10):
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert counters(armed)["steps"] == 10


# --- What vLLM's objects see ----------------------------------------------------------------


def chain(method):
    """The objects from a quant method to its descriptors, with what each holds."""
    holders = [method]
    if method.moe_kernel is not None:
        kernel = method.moe_kernel
        holders += [kernel, kernel.impl, kernel.fused_experts]
    config = method.moe_quant_config
    holders += [config, config._a1, config._a2, config._w1, config._w2]
    return [(holder, copy.copy(vars(holder))) for holder in holders]


@pytest.mark.parametrize("method", [*METHODS, *FULL_SIZE_METHODS])
def test_vllms_own_objects_and_host_copies_are_not_changed(arm, method):
    layer = loaded(method)
    if layer.quant_method.moe_quant_config is None:
        layer._ensure_moe_quant_config_init()
    held = chain(layer.quant_method)
    tensors = {k: t for k, t in {**layer._parameters, **layer._buffers}.items() if t is not None}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    model = Model(layer)
    assert len(arm(model).armed) == 1
    for inputs in steps(layer, 10):
        call(layer, *inputs)

    assert vars(layer.quant_method).pop("apply").__self__ is not layer.quant_method
    for holder, attributes in held:
        assert vars(holder).keys() == attributes.keys()
        assert all(vars(holder)[name] is value for name, value in attributes.items())
    for name, tensor in tensors.items():
        assert getattr(layer, name) is tensor
        assert torch.equal(tensor, values[name])
    assert list(layer.state_dict()) == list(loaded(method).state_dict())


def test_the_config_that_all_unquantized_layers_share_is_not_changed(pair):
    before = copy.deepcopy(configs.FUSED_MOE_UNQUANTIZED_CONFIG)
    uncached, cached, _ = pair()
    assert cached.quant_method.moe_quant_config is configs.FUSED_MOE_UNQUANTIZED_CONFIG
    call(cached, *step(uncached))
    assert configs.FUSED_MOE_UNQUANTIZED_CONFIG == before


def test_the_kernel_sees_a_layer_of_the_same_class_and_attributes(pair):
    seen = []

    class Noting(methods.UnquantizedFusedMoEMethod):
        def forward_native(self, layer, *others):
            seen.append(layer)
            layer.workspace = torch.ones(1)
            return super().forward_native(layer, *others)

    uncached, cached, _ = pair(Noting)
    call(cached, *step(uncached))
    (view,) = seen
    assert view is not cached
    assert isinstance(view, RoutedExperts)
    assert (view.top_k, view.moe_config) == (cached.top_k, cached.moe_config)
    assert view.projections() == cached.projections()
    assert view.w13_weight is not cached.w13_weight
    assert view.w13_weight.shape == cached.w13_weight.shape
    assert view.e_score_correction_bias is cached.e_score_correction_bias


def test_what_a_kernel_sets_on_its_layer_stays_off_vllms_module(pair):
    class Setting(methods.UnquantizedFusedMoEMethod):
        def forward_native(self, layer, *others):
            layer.workspace = torch.ones(1)
            layer.register_buffer("w13_late", torch.ones(1))
            layer.w2_weight = torch.nn.Parameter(layer.w2_weight.detach())
            return super().forward_native(layer, *others)

    uncached, cached, _ = pair(Setting)
    before = {**vars(cached), **cached._parameters, **cached._buffers}
    for inputs in steps(uncached, 5):
        call(cached, *inputs)
    after = {**vars(cached), **cached._parameters, **cached._buffers}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


# --- Counters -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy.CODES)
@pytest.mark.parametrize(
    ("storage", "overflow", "wide"),
    [("virtual", "auto", "rows"), ("plain", "on", "scratch"), ("plain", "off", "skip")],
)
def test_counters_and_their_mirror_are_those_of_the_reference(
    pair, tmp_path, name, storage, overflow, wide
):
    variables = {"overflow": overflow, "policy": name, "decay": 5, "half_life": 3}
    uncached, cached, armed = pair(storage=storage, variables=variables)
    reference = policy.Reference(E, S, name, policy.decay_parameter(name, 3, 5))
    (snapshot,) = telemetry.read_folder(tmp_path / "snapshots")
    for x, weights, ids in steps(uncached, 60):
        if len(x) == 2:
            ids[0] = -1
        assert torch.equal(call(cached, x, weights, ids), call(uncached, x, weights, ids))
        reference.step(ids.numpy(), "rows" if min(E, ids.numel()) <= S else wide)
        assert counters(armed) == reference.counters
    assert reference.counters["hits"] > 0
    mirrored = telemetry.read_snapshot(snapshot.path).counters
    assert mirrored.tolist() == [list(reference.counters.values())]


def test_steps_of_plain_storage_without_scratch_are_counted_as_read_through(pair):
    uncached, cached, armed = pair(storage="plain", variables={"overflow": "off"})
    assert not armed.cache.storage.has_scratch
    for tokens in (NARROW, WIDE, WIDE, NARROW):
        inputs = step(uncached, tokens)
        assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    counted = counters(armed)
    assert (counted["steps"], counted["read_through"]) == (2, 2)
    assert armed.cache.calls() == 4


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_that_was_made_to_forget_starts_again(pair, storage):
    uncached, cached, armed = pair(storage=storage)
    inputs = step(uncached)
    call(cached, *inputs)
    call(cached, *inputs)
    assert counters(armed)["hits"] == 2
    armed.cache.forget()
    assert armed.cache.calls() == 0
    assert sum(counters(armed).values()) == 0
    with torch.no_grad():  # the host copies change, as in a reload of the weights
        for layer in (uncached, cached):
            layer.w13_weight.mul_(2)
    assert torch.equal(call(cached, *inputs), call(uncached, *inputs))
    assert counters(armed)["misses"] == 2


def test_counters_are_kept_where_there_is_no_snapshot(pair):
    uncached, cached, armed = pair(variables={"snapshot": "off"})
    call(cached, *step(uncached))
    assert armed.cache.calls() == counters(armed)["steps"] == 1
