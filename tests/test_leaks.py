"""Per-expert data in a place where the cache cannot replace it: it would be read by row.

Each layer here would run, and be silently wrong, if it were armed.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from synthetic import configs, kernels, methods
from synthetic.checks import model_of

pytest_plugins = ["synthetic.fixtures"]


def hide_in_precision_config(layer):
    scale = layer.w13_weight_scale
    layer.quant_method.moe_quant_config._w1.scale = configs.PrecisionConfig(scale)


def hide_in_list_of_config(layer):
    layer.quant_method.moe_quant_config.gemm1_clamp_limit = [torch.ones(8)]


def hide_in_tuple_of_experts(layer):
    layer.quant_method.moe_kernel.fused_experts.pair = (layer.w13_weight_scale, None)


def hide_in_dict_of_method(layer):
    layer.quant_method.by_name = {"w13": layer.w13_weight_scale}


def hide_in_helper_of_kernel(layer):
    layer.quant_method.moe_kernel.codec = SimpleNamespace(table=SimpleNamespace(x=torch.ones(8, 2)))


def hide_in_helper_of_impl(layer):
    layer.quant_method.moe_kernel.impl.codec = SimpleNamespace(scale=layer.w2_weight_scale)


def hide_in_partial(layer):
    layer.quant_method.run = functools.partial(
        kernels.compute_experts, config=layer.quant_method.moe_quant_config
    )


class Codec:
    def __init__(self, scale):
        self.scale = scale

    def decode(self):
        return self.scale


class SlottedCodec:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


def hide_in_bound_method(layer):
    layer.quant_method.decode = Codec(layer.w13_weight_scale).decode


def hide_in_closure(layer):
    scale = layer.w13_weight_scale
    layer.quant_method.moe_kernel.fused_experts.decode = lambda: scale


def hide_in_object_with_slots(layer):
    layer.quant_method.moe_kernel.fused_experts.codec = SlottedCodec(layer.w13_weight_scale)


def hide_as_the_layer_itself(layer):
    vars(layer.quant_method.moe_kernel.fused_experts)["layer"] = layer


def hide_in_other_dimension(layer):
    layer.quant_method.moe_quant_config._a1.scale = torch.ones(2, 8)


def hide_in_prepare_finalize(layer):
    layer.quant_method.moe_kernel.impl.prepare_finalize.scales = torch.ones(8)


@pytest.mark.parametrize(
    ("hide", "place"),
    [
        (hide_in_precision_config, "_w1.scale.weight_scale"),
        (hide_in_list_of_config, "gemm1_clamp_limit.0"),
        (hide_in_tuple_of_experts, "pair.0"),
        (hide_in_dict_of_method, "by_name.w13"),
        (hide_in_helper_of_kernel, "codec.table.x"),
        (hide_in_helper_of_impl, "codec.scale"),
        (hide_in_partial, "run.keywords.config._w1.scale"),
        (hide_in_bound_method, "quant_method.decode"),
        (hide_in_closure, "fused_experts.decode"),
        (hide_in_object_with_slots, "fused_experts.codec"),
        (hide_as_the_layer_itself, "fused_experts.layer"),
        (hide_in_other_dimension, "_a1.scale"),
        (hide_in_prepare_finalize, "prepare_finalize.scales"),
    ],
)
def test_per_expert_data_out_of_reach_is_refused_by_its_place(refused, hide, place):
    model = model_of(methods.Int8ChannelMoEMethod)
    hide(model.routed[0])
    reason, remedy = refused(model)
    assert reason.startswith("quant_method.")
    assert place in reason
    assert "is per-expert data that the cache cannot stand in for" in reason
    assert "--moe-backend" in remedy


def test_gpt_oss_scales_are_refused(refused):
    reason, _ = refused(model_of(methods.GptOssMxfp4MoEMethod))
    assert "_w1.scale.weight_scale is per-expert data" in reason


def hold_nothing_per_expert(layer):
    kernel = layer.quant_method.moe_kernel
    kernel.impl.workspace = [torch.ones(9), torch.ones(7, 9)]
    kernel.fused_experts.one_value = [torch.ones(1).expand(8)]
    kernel.fused_experts.empty = [torch.empty(8, 0)]
    layer.quant_method.projection = torch.nn.Linear(9, 9)


def test_tensors_that_are_not_per_expert_are_no_leak(arm):
    model = model_of(methods.Int8ChannelMoEMethod)
    hold_nothing_per_expert(model.routed[0])
    assert len(arm(model).armed) == 1
