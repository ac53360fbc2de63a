"""Writes tiny mixture-of-experts checkpoints whose experts are quantised, as vLLM loads them.

    python -m examples.quantised_moe w4a16 FOLDER

Qwen3-MoE with random weights, or gpt-oss where the format is that family's own. Only the experts
are quantised; attention, router and head stay in bfloat16, as in most published checkpoints.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from . import gpt_oss
from . import quantised_tensors as tensors
from .quantised_tensors import BLOCK, GROUP
from .tiny_moe import Shape, Weights, qwen3_moe, write_files

# The least that GPU kernels take: Marlin wants multiples of 128 and 64, block fp8 of 128. Rows
# of 4-bit weights are 64 KiB and more, so that the cache puts them into aliased memory.
GPU_SHAPE = Shape(
    layers=2, hidden=512, heads=4, head=64, experts=32, expert_hidden=256, dense_hidden=512
)

UNQUANTISED = ("lm_head", "re:.*self_attn.*", "re:.*mlp.gate$")


def compressed_tensors(form: str, weights: dict, activations: dict | None = None) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "observer": "minmax", **weights},
        "input_activations": activations,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": list(UNQUANTISED),
        "config_groups": {"group_0": group},
    }


def eight_bits(kind: str, strategy: str, dynamic: bool | None = None) -> dict:
    found = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
    return found if dynamic is None else {**found, "dynamic": dynamic, "observer": None}


def grouped(bits: int, **more) -> dict:
    found = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, **more}
    return compressed_tensors("pack-quantized", found)


def four_bit_float(**more) -> dict:
    return {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "symmetric": True, **more}  # fmt: skip


def fp8(shape: Shape, **more) -> dict:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj",
             "self_attn.o_proj", "mlp.gate")  # fmt: skip
    kept = [f"model.layers.{i}.{part}" for i in range(shape.layers) for part in parts]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", *kept],
        **more,
    }


def gptq(desc_act: bool) -> dict:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": desc_act,
        "sym": True,
        "lm_head": False,
        "dynamic": {"-:.*self_attn.*": {}, "-:.*mlp.gate$": {}},
    }


def awq() -> dict:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
    }


def nvfp4() -> dict:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }


def quantisation_config(scheme: str, shape: Shape) -> dict | None:
    """The `quantization_config` of config.json; None for an unquantised checkpoint."""
    per_token = {kind: eight_bits(kind, "token", dynamic=True) for kind in ("int", "float")}
    static = eight_bits("float", "tensor", dynamic=False)
    found = {
        "int8_channel": compressed_tensors(
            "int-quantized", eight_bits("int", "channel"), per_token["int"]
        ),
        "fp8_channel": compressed_tensors(
            "float-quantized", eight_bits("float", "channel"), per_token["float"]
        ),
        "fp8_static": compressed_tensors("float-quantized", eight_bits("float", "tensor"), static),
        "fp8_tensor": fp8(shape),
        "fp8_block": fp8(shape, weight_block_size=[BLOCK, BLOCK]),
        "w4a16": grouped(4),
        "w4a16_actorder": grouped(4, actorder="group"),
        "w8a16": grouped(8),
        "gptq": gptq(desc_act=False),
        "gptq_desc_act": gptq(desc_act=True),
        "awq": awq(),
        "nvfp4": nvfp4(),
        "nvfp4_ct": compressed_tensors(
            "nvfp4-pack-quantized", four_bit_float(), four_bit_float(dynamic="local")
        ),
    }
    return found.get(scheme)


# What each scheme stores for a weight of an expert. None: the weight itself.
QUANTISERS = {
    "bf16": None,
    "fp16": None,
    **{
        quantise.__name__: quantise
        for quantise in (
            tensors.int8_channel, tensors.fp8_channel, tensors.fp8_tensor, tensors.fp8_static,
            tensors.fp8_block, tensors.w4a16, tensors.w4a16_actorder, tensors.w4a16_dequantised,
            tensors.w8a16, tensors.gptq, tensors.gptq_desc_act, tensors.awq, tensors.nvfp4,
            tensors.nvfp4_ct,
        )
    },
}  # fmt: skip
SCHEMES = (*QUANTISERS, *gpt_oss.SCHEMES)


def write_quantised(scheme: str, folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Writes a checkpoint of a scheme of `SCHEMES` (KeyError otherwise) and returns its folder."""
    weights = Weights(seed)
    if scheme in gpt_oss.SCHEMES:
        write_files(folder, gpt_oss.build(scheme, shape, weights), weights.tensors)
        return folder
    if scheme == "fp8_block":
        shape = replace(shape, expert_hidden=max(shape.expert_hidden, BLOCK))
    quantise = QUANTISERS[scheme]
    config = qwen3_moe(shape, weights)
    if quantisation := quantisation_config(scheme, shape):
        config["quantization_config"] = quantisation
    found = {}
    for name, tensor in weights.tensors.items():
        if quantise and ".experts." in name:
            found.update(quantise(name.removesuffix(".weight"), tensor))
        else:
            found[name] = tensor
    if scheme == "fp16":
        config["torch_dtype"] = "float16"
        found = {name: tensor.to(torch.float16) for name, tensor in found.items()}
    write_files(folder, config, found)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny quantised MoE checkpoint.")
    parser.add_argument("scheme", choices=SCHEMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="of sizes that GPU kernels take")
    arguments = parser.parse_args()
    shape = GPU_SHAPE if arguments.gpu else Shape()
    print(write_quantised(arguments.scheme, arguments.folder, shape, arguments.seed))


if __name__ == "__main__":
    main()
