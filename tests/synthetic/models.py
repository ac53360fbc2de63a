"""Layers, models and routing."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .configs import FusedMoEConfig
from .methods import FusedMoEMethodBase, UnquantizedFusedMoEMethod

# Sums of small tensors: threads cost more than they bring.
torch.set_num_threads(1)

MODEL_CONFIG = SimpleNamespace(model="synthetic", runner_type="generate")


class RoutedExperts(torch.nn.Module):
    """The module that owns the expert weights: `RoutedExperts` (0.25-0.33), `FusedMoE` before."""

    def __init__(
        self, method: type[FusedMoEMethodBase] = UnquantizedFusedMoEMethod, *, experts: int = 8,
        top_k: int = 2, hidden: int = 32, intermediate: int = 64, has_bias: bool = False,
        seed: int = 0, quant_method: FusedMoEMethodBase | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """quant_method: one that another layer has already, to be shared with it. expert_map:
        under expert parallelism, int32 `[ids]`, the expert of this rank that each id names, or
        -1; `experts` are those of this rank."""
        super().__init__()
        self.experts = self.local_num_experts = experts
        self.global_num_experts = experts if expert_map is None else len(expert_map)
        self.top_k = top_k
        self.hidden = hidden
        self.intermediate = intermediate
        self.layer_name = f"model.layers.{seed}.mlp.experts"
        self.moe_config = FusedMoEConfig(
            self.global_num_experts, experts, top_k, hidden, intermediate, has_bias=has_bias
        )
        self.register_buffer("_expert_map", expert_map, persistent=False)
        bias = torch.rand(self.global_num_experts)
        self.e_score_correction_bias = torch.nn.Parameter(bias, requires_grad=False)
        self.quant_method = quant_method or method(self.moe_config)
        self.quant_method.create_weights(self, torch.Generator().manual_seed(seed))

    def projections(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and columns of an expert's two weights."""
        return ("w13", 2 * self.intermediate, self.hidden), ("w2", self.hidden, self.intermediate)

    @property
    def expert_map(self) -> torch.Tensor | None:
        if self._expert_map is not None and self._kernel_wants_mask():
            return (self._expert_map >= 0).to(torch.int32)
        return self._expert_map

    def _kernel_wants_mask(self) -> bool:
        kernel = self.quant_method.moe_kernel
        return kernel is not None and kernel.fused_experts.consumes_expert_mask

    def _ensure_moe_quant_config_init(self) -> None:
        """Called by the runner before every step."""
        method = self.quant_method
        if method.moe_quant_config is None:
            method.moe_quant_config = method.get_fused_moe_quant_config(self)


class MoERunner(torch.nn.Module):
    def __init__(self, routed_experts: RoutedExperts) -> None:
        super().__init__()
        self.routed_experts = routed_experts
        self._quant_method = routed_experts.quant_method


class Model(torch.nn.Module):
    """`layers.<n>.experts.routed_experts`, with modules between that are none of ours."""

    def __init__(self, *layers: RoutedExperts) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for layer in layers:
            block = torch.nn.Module()
            block.norm = torch.nn.LayerNorm(4)
            block.experts = MoERunner(layer)
            self.layers.append(block)

    @property
    def routed(self) -> list[RoutedExperts]:
        return [block.experts.routed_experts for block in self.layers]


def load(model: Model) -> Model:
    """What vLLM's `process_weights_after_loading` does to the MoE layers of a model."""
    for layer in model.routed:
        layer.quant_method.process_weights_after_loading(layer)
    return model


def routing(
    layer: RoutedExperts, tokens: int, random: torch.Generator, dtype: torch.dtype = torch.int32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states `[tokens, H]`, weights and ids `[tokens, k]` of one step."""
    x = torch.randn(tokens, layer.hidden, generator=random)
    weights = torch.rand(tokens, layer.top_k, generator=random)
    lots = torch.rand(tokens, layer.global_num_experts, generator=random)
    return x, weights, lots.topk(layer.top_k).indices.to(dtype)


def call(
    layer: RoutedExperts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """One step as vLLM's runner makes it: by name, through the layer's quant method."""
    layer._ensure_moe_quant_config_init()
    return layer.quant_method.apply(
        layer=layer, x=x, topk_weights=topk_weights, topk_ids=topk_ids,
        shared_experts=None, shared_experts_input=None,
    )  # fmt: skip
