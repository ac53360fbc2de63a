"""Tiny Qwen3-MoE checkpoints whose experts are quantised, in the formats that vLLM loads.

Only the experts are quantised; attention, router and head stay in bfloat16, as in most published
mixture-of-experts checkpoints.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tiny_moe import Shape, Weights, qwen3_moe, write_files

GROUP = 32
BLOCK = 128
UNQUANTISED = ("lm_head", "re:.*self_attn.*", "re:.*mlp.gate$")

Tensors = Iterator[tuple[str, torch.Tensor]]


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Packs `[N, K]` values of 0..15 along K, lowest nibble first, to `[N, K / 8]` int32."""
    nibbles = values.to(torch.int64).unflatten(1, (-1, 8))
    packed = (nibbles << (4 * torch.arange(8))).sum(-1)
    return packed.to(torch.int32)


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 4-bit: int `[N, K]` of -8..7 and bfloat16 scales `[N, K / GROUP]`."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    return values.flatten(1).to(torch.int64), scale


def int8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    yield f"{name}.weight", (weight.float() / scale).round().to(torch.int8)
    yield f"{name}.weight_scale", scale


def fp8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    yield f"{name}.weight", (weight.float() / scale).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale", scale


def fp8_block(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    values = blocks / scale[:, None, :, None]
    yield f"{name}.weight", values.reshape(weight.shape).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", scale


def w4a16(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = quantise_groups(weight)
    yield f"{name}.weight_packed", pack_nibbles(values + 8)
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_shape", torch.tensor(weight.shape)


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = quantise_groups(weight)
    rows, columns = weight.shape
    yield f"{name}.qweight", pack_nibbles(values + 8).t().contiguous()
    yield f"{name}.scales", scale.t().contiguous()
    # The format stores zero points minus one: 7 in every nibble means 8.
    yield f"{name}.qzeros", torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    yield f"{name}.g_idx", (torch.arange(columns) // GROUP).to(torch.int32)


def w4a16_dequantised(name: str, weight: torch.Tensor) -> Tensors:
    """What `w4a16` stands for, as an ordinary float32 tensor."""
    values, scale = quantise_groups(weight)
    yield f"{name}.weight", values * scale.float().repeat_interleave(GROUP, 1)


def compressed_tensors(form: str, weights: dict, activations: dict | None) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "observer": "minmax", **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": list(UNQUANTISED),
        "config_groups": {"group_0": group},
    }


def token_activations(kind: str) -> dict:
    return {
        "num_bits": 8, "type": kind, "strategy": "token", "symmetric": True,
        "dynamic": True, "observer": None,
    }  # fmt: skip


def fp8_block_config(shape: Shape) -> dict:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj",
             "self_attn.o_proj", "mlp.gate")  # fmt: skip
    blocks = [f"model.layers.{i}.{part}" for i in range(shape.layers) for part in parts]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *blocks],
    }


def gptq_config() -> dict:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {"-:.*self_attn.*": {}, "-:.*mlp.gate$": {}},
    }


def channel(kind: str) -> dict:
    return {"num_bits": 8, "type": kind, "strategy": "channel", "group_size": None}


def quantisation_config(scheme: str, shape: Shape) -> dict | None:
    if scheme == "int8_channel":
        return compressed_tensors("int-quantized", channel("int"), token_activations("int"))
    if scheme == "fp8_channel":
        return compressed_tensors("float-quantized", channel("float"), token_activations("float"))
    if scheme == "w4a16":
        groups = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
        return compressed_tensors("pack-quantized", groups, None)
    if scheme == "fp8_block":
        return fp8_block_config(shape)
    if scheme == "gptq":
        return gptq_config()
    return None


SCHEMES = {
    quantise.__name__: quantise
    for quantise in (int8_channel, fp8_channel, fp8_block, w4a16, gptq, w4a16_dequantised)
}


def write_quantised(scheme: str, folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Writes a Qwen3-MoE checkpoint of a scheme of `SCHEMES` and returns its folder."""
    if scheme == "fp8_block":
        shape = replace(shape, expert_hidden=BLOCK)
    weights = Weights(seed)
    config = qwen3_moe(shape, weights)
    if quantisation := quantisation_config(scheme, shape):
        config["quantization_config"] = quantisation
    tensors = {}
    for name, tensor in weights.tensors.items():
        if ".experts." in name:
            tensors.update(SCHEMES[scheme](name.removesuffix(".weight"), tensor))
        else:
            tensors[name] = tensor
    write_files(folder, config, tensors)
    return folder
