"""Quant methods: how each registers its tensors, builds its config and calls its kernel.

All follow the same steps as vLLM's: `create_weights`, then `process_weights_after_loading`, then
`apply(layer=, x=, topk_weights=, topk_ids=, shared_experts=, shared_experts_input=)`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import configs, kernels
from .configs import FusedMoEConfig, FusedMoEQuantConfig, FusedMoEQuantDesc


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class FusedMoEMethodBase:
    kernel_class = kernels.FusedMoEKernel

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.moe_kernel: kernels.FusedMoEKernel | None = None

    @property
    def is_monolithic(self) -> bool:
        return self.moe_kernel is not None and self.moe_kernel.is_monolithic

    def create_weights(self, layer: Any, random: torch.Generator) -> None:
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        raise NotImplementedError

    def make_experts(self, layer: Any) -> kernels.FusedMoEExperts:
        return kernels.TritonExperts(self.moe, self.moe_quant_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = self.kernel_class(
            kernels.MoEPrepareAndFinalizeNoDPEPModular(), self.make_experts(layer)
        )

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=layer.expert_map,
            shared_experts_input=shared_experts_input,
        )


def plain_weights(layer: Any, random: torch.Generator, dtype: torch.dtype) -> None:
    """`w13_weight` [E, 2I, H] and `w2_weight` [E, H, I]."""
    for name, rows, columns in layer.projections():
        values = torch.randn(layer.experts, rows, columns, generator=random)
        if dtype == torch.int8:
            values = values * 40
        layer.register_parameter(f"{name}_weight", parameter(values.to(dtype)))


def scales(layer: Any, random: torch.Generator, shape_of: Any) -> None:
    """`w13_weight_scale` and `w2_weight_scale` of shape `(E, *shape_of(rows, columns))`."""
    for name, rows, columns in layer.projections():
        shape = (layer.experts, *shape_of(rows, columns))
        values = torch.rand(shape, generator=random) * 0.05 + 0.01
        layer.register_parameter(f"{name}_weight_scale", parameter(values))


class CustomOp(torch.nn.Module):
    """vLLM's custom_op.CustomOp: a module that binds one of its own forwards when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase, CustomOp):
    dtype = torch.float32

    def create_weights(self, layer, random):
        plain_weights(layer, random, self.dtype)
        if self.moe.has_bias:
            for name, rows, _ in layer.projections():
                bias = torch.randn(layer.experts, rows, generator=random).to(self.dtype)
                layer.register_parameter(f"{name}_bias", parameter(bias))

    def get_fused_moe_quant_config(self, layer):
        if not self.moe.has_bias:
            return configs.FUSED_MOE_UNQUANTIZED_CONFIG
        return FusedMoEQuantConfig(
            _w1=FusedMoEQuantDesc(bias=layer.w13_bias), _w2=FusedMoEQuantDesc(bias=layer.w2_bias)
        )

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return self.forward(layer, x, topk_weights, topk_ids, shared_experts_input)

    def forward_native(self, layer, x, topk_weights, topk_ids, shared_experts_input):
        return self.moe_kernel.apply(
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, layer.expert_map
        )


class Bfloat16MoEMethod(UnquantizedFusedMoEMethod):
    dtype = torch.bfloat16


class QuantizedMoEMethod(FusedMoEMethodBase):
    """A weight and a scale for each projection, the scale in the config and on the layer."""

    weight_dtype: torch.dtype

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        raise NotImplementedError

    def create_weights(self, layer, random):
        plain_weights(layer, random, self.weight_dtype)
        scales(layer, random, self.scale_shape)

    def get_fused_moe_quant_config(self, layer):
        return FusedMoEQuantConfig(
            _w1=FusedMoEQuantDesc(self.weight_dtype, scale=layer.w13_weight_scale),
            _w2=FusedMoEQuantDesc(self.weight_dtype, scale=layer.w2_weight_scale),
        )


class Int8ChannelMoEMethod(QuantizedMoEMethod):
    """CompressedTensorsW8A8Int8MoEMethod."""

    weight_dtype = torch.int8

    def scale_shape(self, rows, columns):
        return rows, 1


class Fp8BlockMoEMethod(QuantizedMoEMethod):
    """Fp8MoEMethod, 16 x 16 blocks."""

    weight_dtype = torch.float8_e4m3fn

    def scale_shape(self, rows, columns):
        return rows // 16, columns // 16


class Fp8FallbackMoEMethod(Fp8BlockMoEMethod):
    """CompressedTensorsW8A8Fp8MoEMethod on NVIDIA."""

    def make_experts(self, layer):
        return kernels.TritonOrCutlassExperts(self.moe, self.moe_quant_config)


class Fp8TensorMoEMethod(QuantizedMoEMethod):
    """One scale an expert, a derived `g1_alphas` that is on no layer, and an input scale that is
    one number expanded to all experts."""

    weight_dtype = torch.float8_e4m3fn

    def scale_shape(self, rows, columns):
        return ()

    def create_weights(self, layer, random):
        super().create_weights(layer, random)
        layer.register_parameter(
            "w13_input_scale", parameter(torch.tensor(1.5).expand(layer.experts))
        )

    def get_fused_moe_quant_config(self, layer):
        config = super().get_fused_moe_quant_config(layer)
        config._a1 = FusedMoEQuantDesc(self.weight_dtype, scale=layer.w13_input_scale)
        config._w1.alpha_or_gscale = 1 / layer.w13_weight_scale
        return config


class Fp8CutlassMoEMethod(Fp8TensorMoEMethod):
    def make_experts(self, layer):
        return kernels.CutlassExpertsFp8(self.moe, self.moe_quant_config)


class WNA16MoEMethod(FusedMoEMethodBase):
    """CompressedTensorsWNA16MoEMethod (0.33): packed weights under two names, group scales, zero
    points, a shape tensor in the model's type that no kernel reads, empty index tensors."""

    group = 16

    def create_weights(self, layer, random):
        for name, rows, columns in layer.projections():
            packed = torch.randint(
                -(2**31), 2**31, (layer.experts, rows, columns // 8),
                generator=random, dtype=torch.int64,
            ).to(torch.int32)  # fmt: skip
            layer.register_parameter(f"{name}_weight_packed", parameter(packed))
            shape = torch.tensor([[rows, columns]]).repeat(layer.experts, 1).to(torch.bfloat16)
            layer.register_parameter(f"{name}_weight_shape", parameter(shape))
            zero = torch.randint(6, 10, (layer.experts, rows, 1), generator=random)
            layer.register_parameter(f"{name}_weight_zero_point", parameter(zero.to(torch.int32)))
            empty = torch.empty(layer.experts, 0, dtype=torch.int32)
            layer.register_parameter(f"{name}_weight_g_idx", parameter(empty))
        scales(layer, random, lambda rows, columns: (rows, columns // self.group))

    def process_weights_after_loading(self, layer):
        layer.w13_weight = layer.w13_weight_packed
        layer.w2_weight = layer.w2_weight_packed
        super().process_weights_after_loading(layer)

    def get_fused_moe_quant_config(self, layer):
        return FusedMoEQuantConfig(
            _w1=FusedMoEQuantDesc(
                "int4", scale=layer.w13_weight_scale, zp=layer.w13_weight_zero_point[..., 0]
            ),
            _w2=FusedMoEQuantDesc(
                "int4", scale=layer.w2_weight_scale, zp=layer.w2_weight_zero_point[..., 0]
            ),
        )


class QuarkW8A8Int8MoEMethod(Int8ChannelMoEMethod):
    """Builds no kernel; `apply` hands `self.moe_quant_config` to a function (0.21-0.26)."""

    def process_weights_after_loading(self, layer):
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return kernels.compute_experts(
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, self.moe_quant_config,
            expert_map=layer.expert_map,
        )  # fmt: skip


class CompressedTensorsWNA16MoEMethod(QuarkW8A8Int8MoEMethod):
    """0.21-0.26. `layer._ensure_moe_quant_config_init()` makes its config at the first forward."""

    def process_weights_after_loading(self, layer):
        pass


class MoeWNA16Method(QuarkW8A8Int8MoEMethod):
    """0.21-0.26, but reads every tensor off the layer in each step (AWQ and Marlin of 0.21)."""

    def process_weights_after_loading(self, layer):
        pass

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return kernels.compute_experts(
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids,
            self.get_fused_moe_quant_config(layer), expert_map=layer.expert_map,
        )  # fmt: skip


class OldSignatureMoEMethod(Int8ChannelMoEMethod):
    """0.19-0.21: `apply` has no `shared_experts`."""

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts_input):
        return super().apply(layer, x, topk_weights, topk_ids, None, shared_experts_input)


class MonolithicMoEMethod(UnquantizedFusedMoEMethod):
    kernel_class = kernels.FusedMoEKernelMonolithic


class GptOssMxfp4MoEMethod(Int8ChannelMoEMethod):
    """Scales inside a PrecisionConfig (gpt-oss, Triton)."""

    def get_fused_moe_quant_config(self, layer):
        config = super().get_fused_moe_quant_config(layer)
        config._w1.scale = configs.PrecisionConfig(layer.w13_weight_scale)
        config._w2.scale = configs.PrecisionConfig(layer.w2_weight_scale)
        return config
