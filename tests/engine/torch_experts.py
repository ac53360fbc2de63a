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


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One expert's weight as float32 `[N, K]`.

    `weight` is int8 or float8 `[N, K]`, or uint8 `[N, K / 2]` holding 4-bit values plus 8, low
    nibble first. `scale` is `[N]` or `[rows, columns]` of blocks that tile the weight.
    """
    if weight.dtype == torch.uint8:
        values = torch.stack((weight & 15, weight >> 4), -1).flatten(1).float() - 8
    else:
        values = weight.float()
    scale = scale.float().reshape(-1, 1) if scale.dim() == 1 else scale.float()
    for dim in (0, 1):
        scale = scale.repeat_interleave(values.shape[dim] // scale.shape[dim], dim)
    return values * scale


def quantised_activation(values: torch.Tensor, weight_type: torch.dtype) -> torch.Tensor:
    """Float32 `[M, K]`, rounded per row to what the weight's type multiplies with."""
    peak = values.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    if weight_type == torch.int8:
        return (values * (127 / peak)).round() * (peak / 127)
    if weight_type == torch.float8_e4m3fn:
        return (values * (448 / peak)).to(weight_type).float() * (peak / 448)
    return values


class TorchExperts(modular.FusedMoEExpertsModular):
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
        gate_up = quantised_activation(inputs, w13.dtype)
        gate, up = (gate_up @ dequantise(w13[expert], self.w1_scale[expert]).t()).chunk(2, -1)
        inner = quantised_activation(torch.nn.functional.silu(gate) * up, w2.dtype)
        return inner @ dequantise(w2[expert], self.w2_scale[expert]).t()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, **_):
        inputs = hidden_states.float()
        parts = torch.empty(*topk_ids.shape, inputs.shape[1])
        for expert in topk_ids.unique().tolist():
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            parts[token, choice] = self.expert(inputs[token], w1, w2, expert)
        output.copy_((parts * topk_weights.float()[..., None]).sum(1))


def install() -> None:
    """Serves `moe_backend="triton"` with `TorchExperts`, for models loaded from now on."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    triton_moe.TritonExperts = TorchExperts
    int_wna16.TritonWNA16Experts = TorchExperts
    # GPTQ may carry an expert bias, which Triton's kernel has no place for; these have none.
    int_wna16._backend_incompatibility_reason = lambda *_: None
