"""vLLM's configuration objects: fused_moe/config.py, with the fields that 0.21-0.33 share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FusedMoEParallelConfig:
    dp_size: int = 1
    enable_eplb: bool = False


@dataclass
class FusedMoEConfig:
    num_experts: int
    num_local_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    is_lora_enabled: bool = False
    has_bias: bool = False
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)


@dataclass
class PrecisionConfig:
    """What gpt-oss has in place of a scale tensor (triton_kernels.matmul_ogs)."""

    weight_scale: torch.Tensor


@dataclass
class FusedMoEQuantDesc:
    dtype: torch.dtype | str | None = None
    shape: tuple[int, int] | None = None
    scale: torch.Tensor | PrecisionConfig | None = None
    alpha_or_gscale: torch.Tensor | None = None
    zp: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass
class FusedMoEQuantConfig:
    _a1: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _a2: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _w1: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _w2: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    is_scale_swizzled: bool = True
    gemm1_clamp_limit: Any = None

    def config_name(self, dtype: torch.dtype) -> str | None:
        """Part of the name of the file with the tuned kernel configurations."""
        return None if self._w1.dtype is None else str(self._w1.dtype)

    @property
    def a1_scale(self) -> torch.Tensor | None:
        return self._a1.scale

    @property
    def w1_bias(self) -> torch.Tensor | None:
        return self._w1.bias

    @property
    def w2_bias(self) -> torch.Tensor | None:
        return self._w2.bias


# vLLM 0.21 has one such object for every unquantized layer of the process.
FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig()
