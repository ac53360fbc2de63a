"""A LoRA adapter of attention layers, and requests that use it."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.tiny_moe import Shape, write_json

RANK = 8


def write_adapter(folder: Path, shape: Shape = Shape()) -> Path:
    """An adapter of the queries of every layer, random and large enough to change tokens."""
    random = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(shape.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        inner = torch.randn(RANK, shape.hidden, generator=random)
        outer = torch.randn(shape.heads * shape.head, RANK, generator=random)
        tensors |= {f"{name}.lora_A.weight": inner, f"{name}.lora_B.weight": outer}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(
        folder / "adapter_config.json",
        {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]},
    )
    return folder


def play(llm, generate, folder: str) -> dict:
    """What the prompts of the job are answered with through the adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    _, job = generate.args
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = LoRARequest("adapter", 1, folder)
    outputs = llm.generate(job["prompts"], sampling, use_tqdm=False, lora_request=request)
    return {"adapted": [list(output.outputs[0].token_ids) for output in outputs]}
