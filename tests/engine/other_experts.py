"""Writes a model that differs from another in its experts only."""

from pathlib import Path

from safetensors.torch import load_file

from examples.tiny_moe import Shape, Weights, qwen3_moe, write_files


def write_other_experts(first: str, folder: Path, shape: Shape = Shape()) -> Path:
    """first: the folder of a Qwen3-MoE of this shape, whose other weights are taken."""
    weights = Weights(seed=1)
    config = qwen3_moe(shape, weights)
    experts = {name: t for name, t in weights.tensors.items() if ".experts." in name}
    write_files(folder, config, load_file(f"{first}/model.safetensors") | experts)
    return folder
