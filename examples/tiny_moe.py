"""Writes tiny random mixture-of-experts checkpoints that vLLM and transformers load offline.

    python examples/tiny_moe.py qwen3_moe FOLDER

The weights are random and the tokenizer knows bytes only, so the text means nothing. Everything
else is what a real checkpoint has: the architecture's own tensor names, its attention (MLA for
DeepSeek-V2), its shared experts, and enough experts for a cache to have something to do.
The same kind, shape and seed give the same files.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class Shape:
    """Sizes that every architecture shares. vLLM's CPU kernels need multiples of 32."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_value_heads: int = 2
    head: int = 32
    experts: int = 32
    top_k: int = 4
    expert_hidden: int = 64
    dense_hidden: int = 128
    vocabulary: int = 256 + len(SPECIAL_TOKENS)


class Weights:
    """The tensors of one checkpoint, filled in order from one seeded generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, scale: float | None = None) -> None:
        """A `[rows, columns]` weight; by default scaled to keep the variance of its input."""
        scale = columns**-0.5 if scale is None else scale
        values = torch.randn(rows, columns, generator=self.generator) * scale
        self.tensors[f"{name}.weight"] = values.to(torch.bfloat16)

    def bias(self, name: str, size: int) -> None:
        values = torch.randn(size, generator=self.generator) * 0.1
        self.tensors[f"{name}.bias"] = values.to(torch.bfloat16)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    def gated_mlp(self, name: str, hidden: int, intermediate: int) -> None:
        self.matrix(f"{name}.gate_proj", intermediate, hidden)
        self.matrix(f"{name}.up_proj", intermediate, hidden)
        self.matrix(f"{name}.down_proj", hidden, intermediate)

    def experts(self, name: str, shape: Shape) -> None:
        """A router and its experts, as all architectures but Mixtral name them."""
        self.matrix(f"{name}.gate", shape.experts, shape.hidden)
        for expert in range(shape.experts):
            self.gated_mlp(f"{name}.experts.{expert}", shape.hidden, shape.expert_hidden)

    def attention(self, name: str, shape: Shape, key_value_heads: int) -> None:
        queries, keys = shape.heads * shape.head, key_value_heads * shape.head
        self.matrix(f"{name}.q_proj", queries, shape.hidden)
        self.matrix(f"{name}.k_proj", keys, shape.hidden)
        self.matrix(f"{name}.v_proj", keys, shape.hidden)
        self.matrix(f"{name}.o_proj", shape.hidden, queries)

    def layers(self, shape: Shape) -> Iterator[str]:
        """Writes what surrounds the blocks, and yields each block's prefix to be filled."""
        self.matrix("model.embed_tokens", shape.vocabulary, shape.hidden, scale=1.0)
        self.matrix("lm_head", shape.vocabulary, shape.hidden)
        self.norm("model.norm", shape.hidden)
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            self.norm(f"{prefix}.input_layernorm", shape.hidden)
            self.norm(f"{prefix}.post_attention_layernorm", shape.hidden)
            yield prefix


def common_config(shape: Shape, **architecture) -> dict:
    """The entries of config.json that all architectures share, then the architecture's own."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "intermediate_size": shape.dense_hidden,
        "num_experts_per_tok": shape.top_k,
        "hidden_act": "silu",
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attention_bias": False,
        **architecture,
    }


def qwen3_moe(shape: Shape, weights: Weights) -> dict:
    for prefix in weights.layers(shape):
        weights.attention(f"{prefix}.self_attn", shape, shape.key_value_heads)
        weights.norm(f"{prefix}.self_attn.q_norm", shape.head)
        weights.norm(f"{prefix}.self_attn.k_norm", shape.head)
        weights.experts(f"{prefix}.mlp", shape)
    return common_config(
        shape,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=shape.experts,
        moe_intermediate_size=shape.expert_hidden,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def qwen2_moe(shape: Shape, weights: Weights) -> dict:
    """Attention with biases, and a gated shared expert beside the routed ones."""
    for prefix in weights.layers(shape):
        weights.attention(f"{prefix}.self_attn", shape, shape.key_value_heads)
        weights.bias(f"{prefix}.self_attn.q_proj", shape.heads * shape.head)
        weights.bias(f"{prefix}.self_attn.k_proj", shape.key_value_heads * shape.head)
        weights.bias(f"{prefix}.self_attn.v_proj", shape.key_value_heads * shape.head)
        weights.experts(f"{prefix}.mlp", shape)
        weights.gated_mlp(f"{prefix}.mlp.shared_expert", shape.hidden, shape.dense_hidden)
        weights.matrix(f"{prefix}.mlp.shared_expert_gate", 1, shape.hidden)
    return common_config(
        shape,
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        num_experts=shape.experts,
        moe_intermediate_size=shape.expert_hidden,
        shared_expert_intermediate_size=shape.dense_hidden,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def mixtral(shape: Shape, weights: Weights) -> dict:
    for prefix in weights.layers(shape):
        weights.attention(f"{prefix}.self_attn", shape, shape.key_value_heads)
        block = f"{prefix}.block_sparse_moe"
        weights.matrix(f"{block}.gate", shape.experts, shape.hidden)
        for expert in range(shape.experts):
            weights.matrix(f"{block}.experts.{expert}.w1", shape.expert_hidden, shape.hidden)
            weights.matrix(f"{block}.experts.{expert}.w3", shape.expert_hidden, shape.hidden)
            weights.matrix(f"{block}.experts.{expert}.w2", shape.hidden, shape.expert_hidden)
    return common_config(
        shape,
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=shape.experts,
        intermediate_size=shape.expert_hidden,
        sliding_window=None,
    )


def olmoe(shape: Shape, weights: Weights) -> dict:
    """As many key heads as query heads, and norms over all of them together."""
    for prefix in weights.layers(shape):
        weights.attention(f"{prefix}.self_attn", shape, shape.heads)
        weights.norm(f"{prefix}.self_attn.q_norm", shape.heads * shape.head)
        weights.norm(f"{prefix}.self_attn.k_norm", shape.heads * shape.head)
        weights.experts(f"{prefix}.mlp", shape)
    return common_config(
        shape,
        architectures=["OlmoeForCausalLM"],
        model_type="olmoe",
        num_key_value_heads=shape.heads,
        num_experts=shape.experts,
        intermediate_size=shape.expert_hidden,
        norm_topk_prob=False,
        clip_qkv=None,
    )


def deepseek_v2(shape: Shape, weights: Weights) -> dict:
    """Multi-head latent attention, a dense first layer, two shared experts."""
    # vLLM's MLA kernels exist for a latent of 512 and a rotary part of 64 only.
    latent, rotary, plain = 512, 64, shape.head
    for layer, prefix in enumerate(weights.layers(shape)):
        attention = f"{prefix}.self_attn"
        weights.matrix(f"{attention}.q_proj", shape.heads * (plain + rotary), shape.hidden)
        weights.matrix(f"{attention}.kv_a_proj_with_mqa", latent + rotary, shape.hidden)
        weights.norm(f"{attention}.kv_a_layernorm", latent)
        weights.matrix(f"{attention}.kv_b_proj", shape.heads * 2 * plain, latent)
        weights.matrix(f"{attention}.o_proj", shape.hidden, shape.heads * plain)
        if layer == 0:
            weights.gated_mlp(f"{prefix}.mlp", shape.hidden, shape.dense_hidden)
        else:
            weights.experts(f"{prefix}.mlp", shape)
            weights.gated_mlp(f"{prefix}.mlp.shared_experts", shape.hidden, 2 * shape.expert_hidden)
    return common_config(
        shape,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_key_value_heads=shape.heads,
        head_dim=rotary,
        n_routed_experts=shape.experts,
        n_shared_experts=2,
        moe_intermediate_size=shape.expert_hidden,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        kv_lora_rank=latent,
        q_lora_rank=None,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotary,
        v_head_dim=plain,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
    )


KINDS = {build.__name__: build for build in (qwen3_moe, qwen2_moe, mixtral, olmoe, deepseek_v2)}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_tokenizer(folder: Path) -> None:
    """One token a byte, after the special tokens: nothing to train and nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[0],
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_files(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a whole checkpoint folder: configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False},
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)


def write_checkpoint(kind: str, folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Writes one checkpoint of a kind of `KINDS` (KeyError otherwise) and returns its folder."""
    weights = Weights(seed)
    config = KINDS[kind](shape, weights)
    write_files(folder, config, weights.tensors)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random MoE checkpoint.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_checkpoint(arguments.kind, arguments.folder, seed=arguments.seed))


if __name__ == "__main__":
    main()
