"""Unquantised experts in plain torch that look ids up in `expert_map`, as vLLM's do on a GPU.

vLLM's own experts for CPUs ignore the map: under expert parallelism they would read beyond their
weights. `install` serves the unquantised method with the class below in their place; loading,
placement, routing and the sum over ranks stay vLLM's.
"""

import torch
import torch_experts


class TritonExperts(torch_experts.TritonExperts):
    def expert(self, inputs, w13, w2, expert):
        gate, up = (inputs @ w13[expert].float().t()).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ w2[expert].float().t()


def install() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    unquantized.backend_to_kernel_cls = lambda backend: [TritonExperts]
