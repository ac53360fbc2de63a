"""Unquantised experts in plain torch that look ids up in `expert_map`, as vLLM's do on a GPU.

vLLM's own experts for CPUs ignore the map: under expert parallelism they would read beyond their
weights. `install` serves the unquantised method with the class below in their place; loading,
placement, routing and the sum over ranks stay vLLM's.
"""

import torch
from torch_experts import TorchExperts


class TritonExperts(TorchExperts):
    """Stands in for vLLM's class of this name, by which the cache knows how it finds a row."""

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

    def expert(self, inputs, w13, w2, expert):
        gate, up = (inputs @ w13[expert].float().t()).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ w2[expert].float().t()


def install() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    unquantized.backend_to_kernel_cls = lambda backend: [TritonExperts]
