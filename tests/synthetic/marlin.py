"""A kernel that adds up in the order of experts (vLLM's experts/marlin_moe.py), so that its result
depends on where they come in that order."""

from __future__ import annotations

import torch

from . import kernels


def moe_align_block_size(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts):
    """Positions in `topk_ids` sorted by expert, for each the expert it reads, and their number.
    What is no expert comes last and reads none. An id names the expert that the map has for it."""
    assert ignore_invalid_experts and block_size == 1
    ids = kernels.rows_of(topk_ids.reshape(-1), expert_map)
    known = (ids >= 0) & (ids < num_experts)
    order = torch.where(known, ids, num_experts).argsort(stable=True)
    experts = torch.where(known, ids, -1)[order].to(torch.int32)
    return order, experts, known.sum()


def fused_marlin_moe(
    hidden_states, w1, w2, topk_weights, topk_ids, quant_config, global_num_experts, expert_map,
    g_idx1=None, g_idx2=None,
):  # fmt: skip
    """g_idx1, g_idx2: what activation ordering keeps of each expert; here it shifts the output."""
    order, experts, count = moe_align_block_size(
        topk_ids, 1, global_num_experts, expert_map, ignore_invalid_experts=True
    )
    places, experts = order[:count], experts[:count].to(torch.int64)
    tokens = places // topk_ids.shape[1]
    parts = kernels.compute_experts(
        hidden_states[tokens], w1, w2, topk_weights.reshape(-1, 1)[places],
        experts.reshape(-1, 1), quant_config,
    ).float()  # fmt: skip
    if g_idx1 is not None:
        parts += (g_idx1.sum(1) - g_idx2.sum(1))[experts].unsqueeze(1)
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for token, part in zip(tokens.tolist(), parts, strict=True):
        out[token] += part
    return out.to(hidden_states.dtype)


class MarlinExperts(kernels.FusedMoEExperts):
    """0.21-0.28: with activation ordering, per-expert tensors on the object, in no config."""

    def __init__(self, moe_config, quant_config, w13_g_idx=None, w2_g_idx=None):
        super().__init__(moe_config, quant_config)
        self.w13_g_idx = w13_g_idx
        self.w2_g_idx = w2_g_idx

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        return fused_marlin_moe(
            hidden_states, w1, w2, topk_weights, topk_ids, self.quant_config,
            self.moe_config.num_experts, expert_map, self.w13_g_idx, self.w2_g_idx,
        )  # fmt: skip
