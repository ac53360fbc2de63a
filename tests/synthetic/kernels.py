"""vLLM's modular kernel (fused_moe/modular_kernel.py) around a mixture of experts in torch."""

from __future__ import annotations

import torch

from . import tuning
from .configs import FusedMoEConfig, FusedMoEQuantConfig, FusedMoEQuantDesc, PrecisionConfig


def compute_experts(
    hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, config: FusedMoEQuantConfig, block: int = 64,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """hidden `[M, H]`, w1 `[E, 2I, H]`, w2 `[E, H, I]`, or packed. Returns `[M, H]`.
    block: how many products are added before they are added to the sum. expert_map: the row that
    each id names, or -1; None: its own number.

    Everything is read at the row that an id names; an id that names none adds nothing. A token's
    experts are added in the order of its ids, so that the sum does not depend on their rows.
    """
    rows = rows_of(topk_ids, expert_map)
    valid = (rows >= 0) & (rows < w1.shape[0])
    flat = torch.where(valid, rows, 0).reshape(-1)
    tokens = hidden.float().repeat_interleave(rows.shape[1], 0)
    if config.a1_scale is not None:
        tokens = tokens * config.a1_scale[flat].reshape(-1, 1)
    inner = project(tokens, w1, config._w1, flat, block)
    gate, up = inner.chunk(2, -1)
    out = project(torch.nn.functional.silu(gate) * up, w2, config._w2, flat, block)
    out = out * (topk_weights.float() * valid).reshape(-1, 1)
    return out.reshape(*rows.shape, hidden.shape[1]).sum(1).to(hidden.dtype)


def rows_of(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """int64: the row that each id names, or what is no row."""
    ids = topk_ids.to(torch.int64)
    if expert_map is None:
        return ids
    known = (ids >= 0) & (ids < len(expert_map))
    return torch.where(known, expert_map[torch.where(known, ids, 0)].to(torch.int64), -1)


def project(
    tokens: torch.Tensor, weight: torch.Tensor, desc: FusedMoEQuantDesc, rows: torch.Tensor,
    block: int,
) -> torch.Tensor:  # fmt: skip
    """Each token by the expert of its row: `[n, K]` to `[n, N]`, in float32."""
    values, tokens = dequantise(weight, desc, rows), tokens.unsqueeze(-1)
    parts = zip(values.split(block, 2), tokens.split(block, 1), strict=True)
    out = sum(part @ token for part, token in parts).squeeze(-1)
    return out if desc.bias is None else out + desc.bias[rows].float()


def dequantise(weight: torch.Tensor, desc: FusedMoEQuantDesc, rows: torch.Tensor) -> torch.Tensor:
    """The experts of some rows in float32 `[n, N, K]`."""
    values = weight[rows]
    if weight.dtype == torch.int32:  # eight 4-bit values a word
        nibbles = torch.stack([(values >> (4 * i)) & 15 for i in range(8)], -1).flatten(2)
        values = nibbles - (8 if desc.zp is None else desc.zp[rows].unsqueeze(-1))
    values = values.float()
    scale = desc.scale
    if isinstance(scale, PrecisionConfig):
        scale = scale.weight_scale
    if scale is not None:
        scale = scale[rows].float().reshape(len(rows), *(scale.shape[1:] or (1, 1)))
        for dim in (1, 2):
            scale = scale.repeat_interleave(values.shape[dim] // scale.shape[dim], dim)
        values = values * scale
    if desc.alpha_or_gscale is not None:
        values = values * desc.alpha_or_gscale[rows].float().reshape(-1, 1, 1)
    return values


class FusedMoEExperts:
    """`apply` is called by name, as the modular kernel does it."""

    consumes_expert_mask = False
    block_shape = None

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.moe_config = moe_config
        self.quant_config = quant_config

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        return compute_experts(
            hidden_states, w1, w2, topk_weights, topk_ids, self.quant_config, expert_map=expert_map
        )


class TritonExperts(FusedMoEExperts):
    """Reads the number of experts from the weights only, also to look up its configuration."""

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        tuned = tuning.fused_moe.try_get_optimal_moe_config(
            w1.size(),
            w2.size(),
            topk_ids.shape[1],
            self.quant_config.config_name(hidden_states.dtype),
            len(hidden_states),
            block_shape=self.block_shape,
        )
        return compute_experts(
            hidden_states, w1, w2, topk_weights, topk_ids, self.quant_config,
            tuned["BLOCK_SIZE_K"], expert_map,
        )  # fmt: skip


class CutlassExpertsFp8(FusedMoEExperts):
    """Sized by the number of experts when it is built."""

    def __init__(self, moe_config, quant_config):
        super().__init__(moe_config, quant_config)
        self.ab_strides1 = torch.full((moe_config.num_local_experts,), moe_config.hidden_dim)

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        assert w1.shape[0] == self.moe_config.num_local_experts
        return super().apply(hidden_states, w1, w2, topk_weights, topk_ids, expert_map)


class TritonOrCutlassExperts(FusedMoEExperts):
    """experts/fallback.py: two experts objects in one, each with its own reference to the
    config. The choice between them depends on the step."""

    def __init__(self, moe_config, quant_config):
        super().__init__(moe_config, quant_config)
        self.experts = CutlassExpertsFp8(moe_config, quant_config)
        self.fallback_experts = TritonExperts(moe_config, quant_config)

    def apply(self, hidden_states, **arguments):
        chosen = self.experts if len(hidden_states) > 4 else self.fallback_experts
        return chosen.apply(hidden_states, **arguments)


class AiterExperts(FusedMoEExperts):
    """Wants a mask of the rank's experts in place of the map."""

    consumes_expert_mask = True


class CPUUnquantizedExperts(FusedMoEExperts):
    """Takes every id for a row of its own weights."""

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        return super().apply(hidden_states, w1, w2, topk_weights, topk_ids, None)


class MoEPrepareAndFinalizeNoDPEPModular:
    pass


class MoEPrepareAndFinalizeNaiveDPEPModular:
    """Gathers the routing ids of all data-parallel ranks after `apply` was called."""


class FusedMoEKernelModularImpl:
    def __init__(self, prepare_finalize, fused_experts: FusedMoEExperts) -> None:
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map):
        if len(hidden_states) == 0:
            return torch.empty_like(hidden_states)
        return self.fused_experts.apply(
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
        )


class FusedMoEKernel:
    def __init__(self, prepare_finalize, fused_experts: FusedMoEExperts) -> None:
        self.impl = FusedMoEKernelModularImpl(prepare_finalize, fused_experts)

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def prepare_finalize(self):
        return self.impl.prepare_finalize

    @property
    def fused_experts(self) -> FusedMoEExperts:
        return self.impl.fused_experts

    def apply(
        self, hidden_states, w1, w2, topk_weights, topk_ids, expert_map=None,
        shared_experts_input=None,
    ):  # fmt: skip
        return self.impl.apply(hidden_states, w1, w2, topk_weights, topk_ids, expert_map)


class FusedMoEKernelMonolithic(FusedMoEKernel):
    @property
    def is_monolithic(self) -> bool:
        return True
