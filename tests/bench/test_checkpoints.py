"""What the checkpoint writer stores stands for the weights it was given.

Each format is read back as its own documentation says, value by value, and not with the writer's
own functions.
"""

import re

import pytest
import torch

from examples import quantised_tensors as quantised
from examples.quantised_moe import GPU_SHAPE, QUANTISERS, SCHEMES, quantisation_config

NAME = "model.layers.0.mlp.experts.3.gate_proj"
ROWS, COLUMNS = 128, 256
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(ROWS, COLUMNS, generator=generator) / 16).to(torch.bfloat16)


def stored(scheme: str, weight: torch.Tensor, name: str = NAME) -> dict[str, torch.Tensor]:
    tensors = QUANTISERS[scheme](name, weight)
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors}


def nibble(word: int, position: int) -> int:
    return (word >> (4 * position)) & 15


def four_bit(byte: int, high: bool) -> float:
    code = byte >> 4 if high else byte & 15
    return E2M1[code & 7] * (-1 if code & 8 else 1)


# --- One way to read each format: the value at row n, column k ------------------------------


def read_fp8(tensors, n, k):
    scale = tensors["weight_scale"].flatten()
    return tensors["weight"][n, k].float() * scale[n if len(scale) > 1 else 0]


def read_fp8_block(tensors, n, k):
    return tensors["weight"][n, k].float() * tensors["weight_scale_inv"][n // 128, k // 128]


def read_packed(tensors, n, k, bits=4):
    fields = 32 // bits
    word = tensors["weight_packed"][n, k // fields].item()
    value = (word >> (bits * (k % fields))) % 2**bits - 2 ** (bits - 1)
    group = tensors["weight_g_idx"][k] if "weight_g_idx" in tensors else k // 32
    return value * tensors["weight_scale"][n, group].float()


def read_packed_8(tensors, n, k):
    return read_packed(tensors, n, k, bits=8)


def read_gptq(tensors, n, k):
    group = tensors["g_idx"][k]
    zero = nibble(tensors["qzeros"][group, n // 8].item(), n % 8) + 1
    value = nibble(tensors["qweight"][k // 8, n].item(), k % 8)
    return (value - zero) * tensors["scales"][group, n].float()


def read_awq(tensors, n, k):
    """Output n of eight lies in nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    position = (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]
    value = nibble(tensors["qweight"][k, n // 8].item(), position)
    zero = nibble(tensors["qzeros"][k // 32, n // 8].item(), position)
    return (value - zero) * tensors["scales"][k // 32, n].float()


def read_nvfp4(tensors, n, k):
    value = four_bit(tensors["weight"][n, k // 2].item(), k % 2)
    return value * tensors["weight_scale"][n, k // 16].float() * tensors["weight_scale_2"]


def read_nvfp4_ct(tensors, n, k):
    value = four_bit(tensors["weight_packed"][n, k // 2].item(), k % 2)
    return value * tensors["weight_scale"][n, k // 16].float() / tensors["weight_global_scale"][0]


# Reader, and the share of the weight's spread that rounding may cost on average.
READERS = {
    "int8_channel": (read_fp8, 0.01),
    "fp8_channel": (read_fp8, 0.03),
    "fp8_tensor": (read_fp8, 0.03),
    "fp8_static": (read_fp8, 0.03),
    "fp8_block": (read_fp8_block, 0.03),
    "w4a16": (read_packed, 0.1),
    "w4a16_actorder": (read_packed, 0.1),
    "w8a16": (read_packed_8, 0.01),
    "gptq": (read_gptq, 0.1),
    "gptq_desc_act": (read_gptq, 0.1),
    "awq": (read_awq, 0.1),
    "nvfp4": (read_nvfp4, 0.1),
    "nvfp4_ct": (read_nvfp4_ct, 0.1),
}
PLACES = [(n, k) for n in range(0, ROWS, 9) for k in range(0, COLUMNS, 7)]


@pytest.mark.parametrize("scheme", READERS)
def test_a_value_that_is_read_back_is_the_one_written(scheme, weight):
    reader, allowed = READERS[scheme]
    tensors = stored(scheme, weight)
    errors = [abs(float(reader(tensors, n, k)) - weight[n, k].item()) for n, k in PLACES]
    assert sum(errors) / len(errors) < allowed * weight.float().std()


def test_every_scheme_with_a_format_of_its_own_is_read_back():
    assert set(READERS) == {n for n, quantise in QUANTISERS.items() if quantise} - {
        "w4a16_dequantised"
    }


def test_mxfp4_blocks_are_read_back(weight):
    blocks, scales = quantised.mxfp4_parts(weight)
    assert blocks.shape == (ROWS, COLUMNS // 32, 16)
    for n, k in PLACES:
        value = four_bit(blocks[n, k // 32, k % 32 // 2].item(), k % 2)
        read = value * 2.0 ** (scales[n, k // 32].item() - 127)
        assert abs(read - weight[n, k].item()) < 0.06


def test_what_4_bits_stand_for_is_the_dequantised_checkpoint(weight):
    expected = stored("w4a16_dequantised", weight)["weight"]
    tensors = stored("w4a16", weight)
    assert all(read_packed(tensors, n, k) == expected[n, k] for n, k in PLACES)


@pytest.mark.parametrize("scheme", ("gptq_desc_act", "w4a16_actorder"))
def test_ordered_columns_are_in_full_groups_and_not_in_order(scheme, weight):
    tensors = stored(scheme, weight)
    order = tensors["g_idx"] if "g_idx" in tensors else tensors["weight_g_idx"]
    assert order.bincount().tolist() == [quantised.GROUP] * (COLUMNS // quantised.GROUP)
    assert not torch.equal(order, order.sort().values)


@pytest.mark.parametrize("scheme", ("gptq_desc_act", "nvfp4"))
def test_gate_and_up_projection_share_what_one_matrix_must(scheme, weight):
    shared = "g_idx" if scheme == "gptq_desc_act" else "weight_scale_2"
    gate, up, other = (
        stored(scheme, weight, NAME.replace("3.gate", name))[shared]
        for name in ("3.gate", "3.up", "4.gate")
    )
    assert torch.equal(gate, up)
    assert not torch.equal(gate, other)


def test_what_is_not_an_expert_stays_out_of_every_configuration():
    """`lm_head` stands for attention and router, whose names each format writes in its own way."""
    for scheme in SCHEMES:
        config = quantisation_config(scheme, GPU_SHAPE)
        if config and "dynamic" not in config:  # GPTQ quantises a head only where told to
            kept = config.get("ignore") or config["modules_to_not_convert"]
            assert "lm_head" in kept
            assert any(re.search("self_attn", name) for name in kept)


def test_rows_of_four_bit_weights_are_large_enough_to_be_aliased():
    from expert_cache_shim.storage import ALIAS_FROM

    assert GPU_SHAPE.hidden * GPU_SHAPE.expert_hidden // 2 >= ALIAS_FROM
