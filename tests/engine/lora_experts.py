"""Unquantised experts in plain torch for an engine with LoRA.

With LoRA vLLM gives every mixture-of-experts layer to its Triton kernel, which no CPU runs.
`install` serves with the class below in its place. Adapters of experts it leaves out, as vLLM has
no kernel on a CPU for those either.
"""

import mapped_experts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin


class TritonExperts(LoRAExpertsMixin, mapped_experts.TritonExperts):
    pass


def install() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    unquantized.backend_to_kernel_cls = lambda backend: [TritonExperts]
