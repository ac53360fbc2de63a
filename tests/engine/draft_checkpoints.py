"""Writes tiny random checkpoints that draft tokens: for another model, or for themselves.

EAGLE and EAGLE-3 heads are dense, and read hidden states of Qwen3-MoE. GLM-4-MoE and DeepSeek-V3
come with a block more (MTP), which has experts of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from examples.tiny_moe import Shape, Weights, common_config, deepseek_v2, write_files


def eagle(shape: Shape, weights: Weights) -> dict:
    """One decoder layer behind a projection of an embedding and a hidden state; the projection
    stands for the norm of its input."""
    weights.matrix("fc", shape.hidden, 2 * shape.hidden)
    return _llama_layer("layers.0", shape, weights, shape.hidden)


def eagle3(shape: Shape, weights: Weights) -> dict:
    """One decoder layer for an embedding beside a projection of three hidden states."""
    weights.matrix("fc", shape.hidden, 3 * shape.hidden)
    weights.norm("midlayer.input_layernorm", shape.hidden)
    weights.norm("midlayer.hidden_norm", shape.hidden)
    weights.norm("norm", shape.hidden)
    weights.matrix("lm_head", shape.vocabulary, shape.hidden)
    config = _llama_layer("midlayer", shape, weights, 2 * shape.hidden)
    return config | {
        "draft_vocab_size": shape.vocabulary,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }


def _llama_layer(name: str, shape: Shape, weights: Weights, inputs: int) -> dict:
    heads = {"q": shape.heads, "k": shape.key_value_heads, "v": shape.key_value_heads}
    for kind, count in heads.items():
        weights.matrix(f"{name}.self_attn.{kind}_proj", count * shape.head, inputs)
    weights.matrix(f"{name}.self_attn.o_proj", shape.hidden, shape.heads * shape.head)
    weights.gated_mlp(f"{name}.mlp", shape.hidden, shape.dense_hidden)
    weights.norm(f"{name}.post_attention_layernorm", shape.hidden)
    return common_config(
        shape, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1
    )


class PredictingWeights(Weights):
    """Weights with one block after the last, which predicts the token after the next one."""

    def layers(self, shape: Shape) -> Iterator[str]:
        yield from super().layers(shape)
        prefix = f"model.layers.{shape.layers}"
        for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            self.norm(f"{prefix}.{norm}", shape.hidden)
        self.norm(f"{prefix}.shared_head.norm", shape.hidden)
        self.matrix(f"{prefix}.eh_proj", shape.hidden, 2 * shape.hidden)
        # The block's own names for the model's embedding and output layer.
        for name, own in (("model.embed_tokens", "embed_tokens"), ("lm_head", "shared_head.head")):
            self.tensors[f"{prefix}.{own}.weight"] = self.tensors[f"{name}.weight"].clone()
        yield prefix


def glm4_moe(shape: Shape, weights: Weights) -> dict:
    """Attention with half of it rotary, a dense first layer, one shared expert."""
    for layer, prefix in enumerate(weights.layers(shape)):
        weights.attention(f"{prefix}.self_attn", shape, shape.key_value_heads)
        if layer == 0:
            weights.gated_mlp(f"{prefix}.mlp", shape.hidden, shape.dense_hidden)
        else:
            weights.experts(f"{prefix}.mlp", shape)
            weights.gated_mlp(f"{prefix}.mlp.shared_experts", shape.hidden, shape.expert_hidden)
    _correct_routing(shape, weights)
    return common_config(
        shape,
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        n_routed_experts=shape.experts,
        n_shared_experts=1,
        moe_intermediate_size=shape.expert_hidden,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=1,
    )


def deepseek_v3(shape: Shape, weights: Weights) -> dict:
    config = deepseek_v2(shape, weights)
    _correct_routing(shape, weights)
    return config | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    }


def _correct_routing(shape: Shape, weights: Weights) -> None:
    """Gives every router the bias by which these two architectures balance their experts."""
    for layer in range(1, shape.layers + 1):
        bias = torch.randn(shape.experts, generator=weights.generator) * 0.1
        weights.tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias


KINDS = {
    "eagle": (eagle, Weights),
    "eagle3": (eagle3, Weights),
    "glm4_moe": (glm4_moe, PredictingWeights),
    "deepseek_v3": (deepseek_v3, PredictingWeights),
}


def write_draft_checkpoint(kind: str, folder: Path, shape: Shape = Shape(), seed: int = 1) -> Path:
    """Writes one checkpoint of a kind of `KINDS` and returns its folder."""
    build, weights_of = KINDS[kind]
    weights = weights_of(seed)
    config = build(shape, weights)
    write_files(folder, config, weights.tensors)
    return folder
