"""How an armed layer is called, what it leaves alone, and what it does when a kernel fails."""

from __future__ import annotations

import copy

import pytest
import torch
from synthetic import Model, RoutedExperts, call, configs, load, marlin_methods, methods
from synthetic.checks import counters, loaded_layer, step, steps

from expert_cache_shim import native
from expert_cache_shim.entry import Entry

pytest_plugins = ["synthetic.fixtures"]

STORAGES = ("virtual", "plain")


# --- How it is called -----------------------------------------------------------------------


def test_arguments_may_be_positional_by_name_or_mixed(pair):
    uncached, cached, armed = pair()
    x, weights, ids = step(uncached)
    expected = call(uncached, x, weights, ids)
    apply = cached.quant_method.apply
    rest = {"shared_experts": None, "shared_experts_input": None}
    assert torch.equal(apply(cached, x, weights, ids, None, None), expected)
    assert torch.equal(apply(cached, x, weights, topk_ids=ids, **rest), expected)
    assert torch.equal(
        apply(topk_ids=ids, x=x, layer=cached, topk_weights=weights, **rest), expected
    )
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


@pytest.mark.parametrize(
    "method",
    [
        methods.UnquantizedFusedMoEMethod,
        methods.Fp8TensorMoEMethod,
        methods.Fp8FallbackMoEMethod,
        methods.WNA16MoEMethod,
        marlin_methods.MarlinMoEMethod,
        methods.QuarkW8A8Int8MoEMethod,
        methods.CompressedTensorsWNA16MoEMethod,
        methods.MoeWNA16Method,
    ],
)
def test_vllms_own_objects_and_host_copies_are_not_changed(arm, method):
    layer = loaded_layer(method)
    if layer.quant_method.moe_quant_config is None:
        layer._ensure_moe_quant_config_init()
    held = chain(layer.quant_method)
    tensors = {k: t for k, t in {**layer._parameters, **layer._buffers}.items() if t is not None}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    model = Model(layer)
    assert len(arm(model).armed) == 1
    for inputs in steps(layer, 10):
        call(layer, *inputs)

    assert isinstance(vars(layer.quant_method).pop("apply"), Entry)
    for holder, attributes in held:
        assert vars(holder).keys() == attributes.keys()
        assert all(vars(holder)[name] is value for name, value in attributes.items())
    for name, tensor in tensors.items():
        assert getattr(layer, name) is tensor
        assert torch.equal(tensor, values[name])
    assert list(layer.state_dict()) == list(loaded_layer(method).state_dict())


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
