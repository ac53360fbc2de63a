"""A kernel that adds up in the order of experts (vLLM's experts/marlin_moe.py), so that its result
depends on where they come in that order."""

from __future__ import annotations

import torch

from . import kernels, methods


def moe_align_block_size(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts):
    """Positions in `topk_ids` sorted by expert, for each the expert it reads, and their number.
    What is no expert comes last and reads none. An id names the expert that the map has for it."""
    assert ignore_invalid_experts and block_size == 1
    ids = kernels.rows_of(topk_ids.reshape(-1), expert_map)
    known = (ids >= 0) & (ids < num_experts)
    order = torch.where(known, ids, num_experts).argsort(stable=True)
    experts = torch.where(known, ids, -1)[order].to(torch.int32)
    return order, experts, known.sum()


class MarlinExperts(kernels.FusedMoEExperts):
    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        order, experts, count = moe_align_block_size(
            topk_ids, 1, self.moe_config.num_experts, expert_map, ignore_invalid_experts=True
        )
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for place, expert in zip(order[:count].tolist(), experts.tolist()):
            token = place // topk_ids.shape[1]
            out[token] += kernels.compute_experts(
                hidden_states[token : token + 1], w1, w2,
                topk_weights.reshape(-1)[place].reshape(1, 1), torch.tensor([[expert]]),
                self.quant_config,
            )[0].float()  # fmt: skip
        return out.to(hidden_states.dtype)


class OrderedMoEMethod(methods.UnquantizedFusedMoEMethod):
    def make_experts(self, layer):
        return MarlinExperts(self.moe, self.moe_quant_config)
