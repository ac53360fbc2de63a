"""Tiny gpt-oss checkpoints: experts with biases, in bfloat16 or in MXFP4 as that family stores
them, all experts of a layer in one tensor."""

import torch

from .quantised_tensors import mxfp4_parts
from .tiny_moe import Shape, Weights, common_config

SCHEMES = ("gpt_oss_bf16", "mxfp4")


def build(scheme: str, shape: Shape, weights: Weights) -> dict:
    """Fills `weights` for a scheme of `SCHEMES` and returns the configuration."""
    for prefix in weights.layers(shape):
        attention = f"{prefix}.self_attn"
        weights.attention(attention, shape, shape.key_value_heads)
        weights.bias(f"{attention}.q_proj", shape.heads * shape.head)
        weights.bias(f"{attention}.k_proj", shape.key_value_heads * shape.head)
        weights.bias(f"{attention}.v_proj", shape.key_value_heads * shape.head)
        weights.bias(f"{attention}.o_proj", shape.hidden)
        weights.tensors[f"{attention}.sinks"] = torch.zeros(shape.heads, dtype=torch.bfloat16)
        weights.matrix(f"{prefix}.mlp.router", shape.experts, shape.hidden)
        weights.bias(f"{prefix}.mlp.router", shape.experts)
        for name, rows, columns in (
            ("gate_up_proj", 2 * shape.expert_hidden, shape.hidden),
            ("down_proj", shape.hidden, shape.expert_hidden),
        ):
            projection(
                f"{prefix}.mlp.experts.{name}", scheme, shape.experts, rows, columns, weights
            )
    config = common_config(
        shape,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        intermediate_size=shape.expert_hidden,
        num_local_experts=shape.experts,
        experts_per_token=shape.top_k,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (shape.layers // 2),
        swiglu_limit=7.0,
        rope_theta=150000,
    )
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }  # fmt: skip
    config.update(rope_scaling=yarn, rope_parameters={**yarn, "rope_theta": 150000})
    if scheme == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        }  # fmt: skip
    return config


def projection(
    name: str, scheme: str, experts: int, rows: int, columns: int, weights: Weights
) -> None:
    """One projection of all experts, `[experts, rows, columns]`, and its bias."""
    weights.bias(name, experts * rows)
    weights.tensors[f"{name}_bias"] = weights.tensors.pop(f"{name}.bias").view(experts, rows)
    weights.matrix(name, experts * rows, columns)
    weight = weights.tensors.pop(f"{name}.weight").view(experts, rows, columns)
    if scheme == "mxfp4":
        blocks, scales = mxfp4_parts(weight)
        weights.tensors[f"{name}_blocks"], weights.tensors[f"{name}_scales"] = blocks, scales
    else:
        weights.tensors[name] = weight.transpose(1, 2).contiguous()
