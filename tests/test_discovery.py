"""Which tensors of a layer are found to be indexed by expert, for every scheme of weights."""

import functools
from types import SimpleNamespace

import pytest
import torch
from synthetic import Model, RoutedExperts, load, marlin_methods, methods

from expert_cache_shim import arming
from expert_cache_shim.discovery import (
    ExpertTensors,
    NotExpertMajor,
    count_experts,
    layer_tensors,
    reachable_tensors,
    record_bytes,
)

E = 8


def loaded(method, **options):
    layer = RoutedExperts(method, experts=E, **options)
    load(Model(layer))
    return layer


def discovered(layer):
    """The first name or place of every tensor found."""
    return {entry.label for entry in arming.discover(layer, count_experts(layer))}


WEIGHTS = {"w13_weight", "w2_weight"}
SCALED = WEIGHTS | {"w13_weight_scale", "w2_weight_scale"}


@pytest.mark.parametrize(
    ("method", "options", "names"),
    [
        (methods.UnquantizedFusedMoEMethod, {}, WEIGHTS),
        (methods.UnquantizedFusedMoEMethod, {"has_bias": True}, WEIGHTS | {"w13_bias", "w2_bias"}),
        (methods.Int8ChannelMoEMethod, {}, SCALED),
        (methods.Fp8BlockMoEMethod, {}, SCALED),
        (methods.Fp8FallbackMoEMethod, {}, SCALED | {"fused_experts.experts.ab_strides1"}),
        (methods.QuarkW8A8Int8MoEMethod, {}, SCALED),
        (methods.CompressedTensorsWNA16MoEMethod, {}, SCALED),
        (methods.MoeWNA16Method, {}, SCALED),
    ],
)
def test_the_tensors_of_each_scheme_are_found(method, options, names):
    assert discovered(loaded(method, **options)) == names


def test_a_packed_layer_has_one_record_for_a_tensor_of_two_names():
    layer = loaded(methods.WNA16MoEMethod)
    assert layer.w13_weight is layer.w13_weight_packed
    names = {frozenset(e.names) for e in arming.discover(layer, E) if "weight_packed" in e.label}
    assert names == {
        frozenset({"w13_weight_packed", "w13_weight"}),
        frozenset({"w2_weight_packed", "w2_weight"}),
    }


def test_a_packed_layer_brings_its_small_tensors_and_not_the_empty_ones():
    found = discovered(loaded(methods.WNA16MoEMethod))
    assert {"w13_weight_scale", "w13_weight_shape", "w13_weight_zero_point"} <= found
    assert not any("g_idx" in name for name in found)  # [E, 0] holds nothing


def test_two_views_of_one_memory_are_two_records():
    layer = loaded(methods.WNA16MoEMethod)  # its config holds zero_point[..., 0]
    shapes = [
        tuple(entry.tensor.shape)
        for entry in arming.discover(layer, E)
        if entry.tensor.data_ptr() == layer.w13_weight_zero_point.data_ptr()
    ]
    assert sorted(shapes) == [(E, 128), (E, 128, 1)]


def test_a_derived_tensor_that_only_a_config_holds_is_found():
    layer = loaded(methods.Fp8TensorMoEMethod)
    alphas = layer.quant_method.moe_quant_config._w1.alpha_or_gscale
    assert alphas.data_ptr() not in {t.data_ptr() for t in layer_tensors(layer).values()}
    assert any(e.tensor is alphas and not e.names for e in arming.discover(layer, E))


def test_a_value_expanded_to_every_expert_is_left_alone():
    layer = loaded(methods.Fp8TensorMoEMethod)
    assert layer.w13_input_scale.shape == (E,)
    assert "w13_input_scale" not in discovered(layer)


def test_tensors_of_the_experts_object_are_found():
    layer = loaded(marlin_methods.MarlinMoEMethod)
    experts = layer.quant_method.moe_kernel.fused_experts
    found = [e.tensor for e in arming.discover(layer, E) if not e.names]
    assert any(t is experts.w13_g_idx for t in found)
    assert any(t is experts.w2_g_idx for t in found)


def test_routing_tensors_of_the_layer_are_not_expert_data():
    layer = loaded(methods.Int8ChannelMoEMethod)
    assert layer.e_score_correction_bias.shape == (E,)
    assert "e_score_correction_bias" not in layer_tensors(layer)
    assert discovered(layer) == SCALED


def test_buffers_and_plain_attributes_count_as_much_as_parameters():
    layer = torch.nn.Module()
    layer.register_buffer("w13_buffer", torch.ones(E, 2))
    layer.w2_plain = torch.ones(E, 2)
    layer.w13_text = "no tensor"
    layer.w1_other = torch.ones(E, 2)
    assert set(layer_tensors(layer)) == {"w13_buffer", "w2_plain"}


def test_experts_are_counted_by_the_largest_projection():
    layer = torch.nn.Module()
    layer.w13_weight = torch.zeros(E, 64, 32)
    layer.w13_weight_shape = torch.zeros(2, 3)
    layer.w2_weight = torch.zeros(99, 64, 99)
    layer.w13_scale = torch.zeros(100000)
    assert count_experts(layer) == E
    assert count_experts(torch.nn.Module()) == 0


# --- ExpertTensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.ones(E - 1, 4),
        torch.ones(4, E),
        torch.ones(E, 0),
        torch.ones(4).expand(E, 4),
    ],
    ids=["scalar", "fewer rows", "experts not first", "empty", "expanded"],
)
def test_a_tensor_that_is_not_indexed_by_expert_is_not_taken(tensor):
    tensors = ExpertTensors(E)
    assert tensors.add(tensor, name="w13_x") is None
    assert len(tensors) == 0


def test_one_tensor_under_three_names_is_one_entry():
    tensors = ExpertTensors(E)
    weight = torch.ones(E, 4)
    entry = tensors.add(weight, name="w13_packed")
    assert tensors.add(weight, name="w13_weight") is entry
    assert tensors.add(weight.view(E, 4), place="config.w") is entry
    assert (entry.names, entry.places) == (["w13_packed", "w13_weight"], ["config.w"])
    assert tensors.find(weight.detach()) is entry


@pytest.mark.parametrize(
    "other",
    [
        lambda weight: weight.view(torch.int32),
        lambda weight: weight[:, :2],
        lambda weight: weight.view(E, 2, 2),
        lambda weight: weight.clone(),
    ],
    ids=["dtype", "part", "shape", "copy"],
)
def test_another_view_of_the_memory_is_another_entry(other):
    tensors = ExpertTensors(E)
    weight = torch.ones(E, 4)
    tensors.add(weight, name="w13_weight")
    assert tensors.find(other(weight)) is None
    tensors.add(other(weight), name="w13_other")
    assert len(tensors) == 2


def test_records_with_gaps_between_them_and_inside_are_measured():
    padded = torch.zeros(E, 6, 40)[:, :5, :32]  # rows of 160 bytes, records of 960
    tensors = ExpertTensors(E)
    entry = tensors.add(padded, name="w13_weight")
    assert entry.stride == 6 * 40 * 4
    assert entry.nbytes == (4 * 40 + 32) * 4 == record_bytes(padded)


def test_transposed_records_stay_whole():
    column_major = torch.zeros(E, 16, 4).transpose(1, 2)
    entry = ExpertTensors(E).add(column_major, name="w13_weight_scale")
    assert (entry.nbytes, entry.stride) == (256, 256)


def test_two_projections_in_one_allocation_are_two_records():
    both = torch.zeros(E, 10)
    tensors = ExpertTensors(E)
    tensors.add(both[:, :6], name="w13_weight")
    tensors.add(both[:, 6:], name="w2_weight")
    assert [(e.nbytes, e.stride) for e in tensors] == [(24, 40), (16, 40)]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, E).t(), torch.zeros(3, E, 5).transpose(0, 1)],
    ids=["two dimensions", "three dimensions"],
)
def test_interleaved_records_are_refused(tensor):
    with pytest.raises(NotExpertMajor, match=r"w13_weight of shape .* and stride .* together"):
        ExpertTensors(E).add(tensor, name="w13_weight")


# --- reachable_tensors ----------------------------------------------------------------------


def places(root, **options):
    return {place for place, _ in reachable_tensors(root, "root", **options)}


def test_tensors_are_reached_through_objects_containers_and_partials():
    tensor = torch.ones(1)
    root = SimpleNamespace(
        direct=tensor,
        listed=[tensor, (tensor,)],
        named={"key": tensor},
        call=functools.partial(print, tensor, scale=tensor),
        inner=SimpleNamespace(deep=SimpleNamespace(tensor=tensor)),
    )
    assert places(root) == {
        "root.direct",
        "root.listed.0",
        "root.listed.1.0",
        "root.named.key",
        "root.call.args.0",
        "root.call.keywords.scale",
        "root.inner.deep.tensor",
    }


def test_a_circle_of_objects_ends():
    first, second = SimpleNamespace(), SimpleNamespace(tensor=torch.ones(1))
    first.other, second.other = second, first
    assert places(first) == {"root.other.tensor"}


def test_modules_and_classes_are_not_searched():
    module = torch.nn.Module()
    module.weight = torch.ones(1)
    holder = type("Holder", (), {"shared": torch.ones(1)})
    assert places(SimpleNamespace(module=module, holder=holder)) == set()


def test_the_search_stops_at_its_depth():
    root = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(tensor=torch.ones(1))))
    assert places(root, depth=2) == set()
    assert places(root, depth=3) == {"root.a.b.tensor"}
