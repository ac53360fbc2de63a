"""Quantised experts in plain torch, so that vLLM's own quantisation methods run on any CPU.

vLLM's quantised CPU kernels need AMX. Its loaders, its `process_weights_after_loading` and its
quantisation configs do not: they only ask an *oracle* which class computes the experts. `install`
answers for the Triton backend, whose weight layouts are plain, with the class below. Everything
else (registration, renaming, packing, scales, aliases) stays vLLM's.

A token's experts are added up in the order of its top-k list, so the sum does not depend on the
rows that the experts lie in.
"""

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP


def dequantise(weight: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """One expert's weight as float32 `[N, K]`.

    `weight` is int8 or float8 `[N, K]`, or uint8 `[N, K * bits / 8]` holding values of 4 bits plus
    8, low nibble first, or of 8 bits plus 128. `scale` is one number, `[N]`, or `[rows, columns]`
    of blocks that tile the weight.
    """
    if weight.dtype != torch.uint8:
        values = weight.float()
    elif bits == 4:
        values = torch.stack((weight & 15, weight >> 4), -1).flatten(1).float() - 8
    else:
        values = weight.float() - 128
    scale = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    for dim in (0, 1):
        scale = scale.repeat_interleave(values.shape[dim] // scale.shape[dim], dim)
    return values * scale


def quantised_activation(
    values: torch.Tensor, weight_type: torch.dtype, scale: torch.Tensor | None
) -> torch.Tensor:
    """Float32 `[M, K]`, rounded to what the weight's type multiplies with: per row, or by the
    checkpoint's one scale for all, which must be of float8."""
    if scale is not None:
        scale = scale.flatten()[0].float()
        return (values / scale).clamp(-448, 448).to(weight_type).float() * scale
    peak = values.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    if weight_type == torch.int8:
        return (values * (127 / peak)).round() * (peak / 127)
    if weight_type == torch.float8_e4m3fn:
        return (values * (448 / peak)).to(weight_type).float() * (peak / 448)
    return values


class TritonExperts(modular.FusedMoEExpertsModular):
    """Stands in for vLLM's class of this name, by which the cache knows it."""

    @staticmethod
    def is_supported_config(cls, config, weight_key, activation_key, activation_format):
        return True, None

    @staticmethod
    def activation_format():
        return modular.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self):
        return True

    @staticmethod
    def _supports_current_device():
        return True

    @staticmethod
    def _supports_no_act_and_mul():
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return True

    @staticmethod
    def _supports_activation(activation):
        return True

    @staticmethod
    def _supports_parallel_config(parallel_config):
        return True

    def workspace_shapes(self, tokens, intermediate, hidden, *sizes):
        return (0,), (0,), (tokens, hidden)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def expert(self, inputs, w13, w2, expert):
        """One expert's MLP over float32 `[M, hidden]`."""
        bits = 8 if self.quant_config.use_int8_w8a16 else 4
        gate_up = quantised_activation(inputs, w13.dtype, self.a1_scale)
        gate, up = (gate_up @ dequantise(w13[expert], self.w1_scale[expert], bits).t()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        inner = quantised_activation(inner, w2.dtype, self.a2_scale)
        return inner @ dequantise(w2[expert], self.w2_scale[expert], bits).t()

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map=None, **_
    ):  # fmt: skip
        rows = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        inputs = hidden_states.float()
        parts = torch.zeros(*topk_ids.shape, inputs.shape[1])
        for row in rows.unique().tolist():
            if row >= 0:
                token, choice = (rows == row).nonzero(as_tuple=True)
                parts[token, choice] = self.expert(inputs[token], w1, w2, row)
        output.copy_((parts * topk_weights.float()[..., None]).sum(1))


def scaled_fp8_quant(values: torch.Tensor, scale: torch.Tensor) -> tuple:
    """vLLM's function of this name, for which its CPU build has no kernel: while loading, gate and
    up projection with a scale each are brought to a common one."""
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def install() -> None:
    """Serves `moe_backend="triton"` with the class above, for models loaded from now on."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    triton_moe.TritonExperts = TritonExperts
    int_wna16.TritonWNA16Experts = TritonExperts
    # GPTQ may carry an expert bias, which Triton's kernel has no place for; these have none.
    int_wna16._backend_incompatibility_reason = lambda *_: None
