"""Models to measure: a config.json and random weights, no checkpoint.

The shapes are those of published models; the number of layers is free.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

LOAD_FORMAT = "random_by_name"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the Qwen3-MoE architecture."""

    hidden: int
    expert_hidden: int
    heads: int
    key_value_heads: int
    head: int = 128
    experts: int = 128
    top_k: int = 8
    vocabulary: int = 151936

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert in bfloat16: gate, up and down projections."""
        return 3 * self.hidden * self.expert_hidden * 2


SHAPES = {
    "qwen3-30b-a3b": Shape(hidden=2048, expert_hidden=768, heads=32, key_value_heads=4),
    "qwen3-235b-a22b": Shape(hidden=4096, expert_hidden=1536, heads=64, key_value_heads=4),
    # The experts of Qwen3-Next-80B-A3B under full attention: many and small.
    "512-experts": Shape(
        hidden=2048, expert_hidden=512, heads=16, key_value_heads=2, head=256, experts=512, top_k=10
    ),
    "tiny": Shape(hidden=64, expert_hidden=32, heads=2, key_value_heads=2, head=32, vocabulary=512),
}


def write_config(shape: Shape, layers: int, folder: Path) -> Path:
    """Writes config.json, all that vLLM needs of a model whose weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def register_loader() -> None:
    """Registers LOAD_FORMAT with vLLM: weights drawn from a seed of each tensor's own name.

    vLLM's `dummy` gives tensors of one shape the same values in every layer, and so small that
    the experts hardly change the output: a record of the wrong layer would go unnoticed.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomByNameLoader(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)


@torch.no_grad()
def fill(name: str, weight: torch.Tensor) -> None:
    """Ones for a norm; for a matrix a normal distribution that keeps the variance of its input."""
    if weight.dim() < 2:
        weight.fill_(1)
        return
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
