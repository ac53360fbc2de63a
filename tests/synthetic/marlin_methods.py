"""Quant methods that come to Marlin: through its kernel, or by a call of their own."""

from __future__ import annotations

import torch

from . import kernels, methods
from .marlin import MarlinExperts, fused_marlin_moe


class OrderedMoEMethod(methods.UnquantizedFusedMoEMethod):
    def make_experts(self, layer):
        return MarlinExperts(self.moe, self.moe_quant_config)


class MarlinMoEMethod(methods.WNA16MoEMethod):
    """0.21-0.28 with activation ordering."""

    def make_experts(self, layer):
        random = torch.Generator().manual_seed(5)
        index = [
            torch.randint(0, 3, (layer.experts, columns), generator=random, dtype=torch.int32)
            for _, _, columns in layer.projections()
        ]
        return MarlinExperts(self.moe, self.moe_quant_config, *index)


class AWQMarlinMoEMethod(methods.MoeWNA16Method):
    """0.21. Builds no kernel."""

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return fused_marlin_moe(
            x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids,
            self.get_fused_moe_quant_config(layer), layer.global_num_experts, layer.expert_map,
        )  # fmt: skip


class QuarkW8A8Fp8MoEMethod(methods.MoeWNA16Method):
    """0.21-0.23. Builds no kernel, and calls Marlin where the GPU has nothing for fp8."""

    use_marlin = True

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        weights = layer.w13_weight, layer.w2_weight
        step = topk_weights, topk_ids, self.get_fused_moe_quant_config(layer)
        if self.use_marlin:
            return fused_marlin_moe(x, *weights, *step, layer.global_num_experts, layer.expert_map)
        return kernels.compute_experts(x, *weights, *step, expert_map=layer.expert_map)
