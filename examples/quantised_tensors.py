"""The arithmetic of quantised checkpoints: one weight in, the tensors of its format out.

Each function takes a name and a bfloat16 weight `[N, K]` of one projection of one expert, and
yields the named tensors that the format stores for it. Rounding is to the nearest; scales come
from the weight. What the values stand for differs from the weight by the format's rounding only.
"""

import re
import zlib
from collections.abc import Iterator

import torch

GROUP = 32  # columns that share a scale in the integer formats
BLOCK = 128  # rows and columns that share a scale in block fp8
FP8_MAX = 448.0
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # E2M1; the sign is the fourth bit
FP4_MAX = 6.0

Tensors = Iterator[tuple[str, torch.Tensor]]


# --- Integers -------------------------------------------------------------------------------


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs `[N, K]` unsigned values along K, lowest bits first, to `[N, K * bits / 32]` int32."""
    count = 32 // bits
    fields = values.to(torch.int64).unflatten(1, (-1, count))
    return (fields << (bits * torch.arange(count))).sum(-1).to(torch.int32)


def quantise_groups(weight: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric: signed integers `[N, K]` and bfloat16 scales `[N, K / GROUP]`."""
    limit = 2 ** (bits - 1)
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / (limit - 1)).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-limit, limit - 1)
    return values.flatten(1).to(torch.int64), scale


def group_order(name: str, columns: int) -> torch.Tensor:
    """For every column the group it belongs to, as activation ordering leaves it: int32 `[K]`.

    Gate and up projection of an expert are one matrix to a kernel, so they share an order.
    """
    shared = re.sub(r"(gate|up)_proj", "gate_up", name)
    generator = torch.Generator().manual_seed(zlib.crc32(shared.encode()))
    return (torch.randperm(columns, generator=generator) // GROUP).to(torch.int32)


def quantise_ordered(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Like `quantise_groups` with 4 bits, but with columns in groups of `group_order`: integers,
    scales, and the order."""
    order = group_order(name, weight.shape[1])
    columns = torch.argsort(order, stable=True)
    grouped, scale = quantise_groups(weight[:, columns])
    values = torch.empty_like(grouped)
    values[:, columns] = grouped
    return values, scale, order


def int8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    yield f"{name}.weight", (weight.float() / scale).round().to(torch.int8)
    yield f"{name}.weight_scale", scale


def packed(name: str, values: torch.Tensor, scale: torch.Tensor, bits: int) -> Tensors:
    yield f"{name}.weight_packed", pack(values + 2 ** (bits - 1), bits)
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_shape", torch.tensor(values.shape)


def w4a16(name: str, weight: torch.Tensor) -> Tensors:
    yield from packed(name, *quantise_groups(weight), bits=4)


def w8a16(name: str, weight: torch.Tensor) -> Tensors:
    yield from packed(name, *quantise_groups(weight, bits=8), bits=8)


def w4a16_actorder(name: str, weight: torch.Tensor) -> Tensors:
    values, scale, order = quantise_ordered(name, weight)
    yield from packed(name, values, scale, bits=4)
    yield f"{name}.weight_g_idx", order


def w4a16_dequantised(name: str, weight: torch.Tensor) -> Tensors:
    """What `w4a16` stands for, as an ordinary float32 tensor."""
    values, scale = quantise_groups(weight)
    yield f"{name}.weight", values * scale.float().repeat_interleave(GROUP, 1)


def gptq_tensors(
    name: str, values: torch.Tensor, scale: torch.Tensor, order: torch.Tensor
) -> Tensors:
    rows, columns = values.shape
    yield f"{name}.qweight", pack(values + 8, 4).t().contiguous()
    yield f"{name}.scales", scale.t().contiguous()
    # The format stores zero points minus one: 7 in every nibble means 8.
    yield f"{name}.qzeros", torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    yield f"{name}.g_idx", order


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    order = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    yield from gptq_tensors(name, *quantise_groups(weight), order)


def gptq_desc_act(name: str, weight: torch.Tensor) -> Tensors:
    yield from gptq_tensors(name, *quantise_ordered(name, weight))


# AWQ packs along N, and the eight values of a word in this order.
AWQ_NIBBLE = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def pack_awq(values: torch.Tensor) -> torch.Tensor:
    nibbles = values.to(torch.int64).unflatten(1, (-1, 8))
    return (nibbles << (4 * AWQ_NIBBLE)).sum(-1).to(torch.int32)


def awq(name: str, weight: torch.Tensor) -> Tensors:
    """4 bits with zero points: a group's range, zero included, is cut into 15 steps."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).to(torch.bfloat16)
    zero = (-low / scale.float()).round().clamp(0, 15)
    values = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    yield f"{name}.qweight", pack_awq(values.flatten(1).t())
    yield f"{name}.scales", scale.t().contiguous()
    yield f"{name}.qzeros", pack_awq(zero.t())


# --- 8-bit floating point -------------------------------------------------------------------


def fp8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    yield f"{name}.weight", (weight.float() / scale).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale", scale


def fp8_tensor(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax().reshape(1) / FP8_MAX
    yield f"{name}.weight", (weight.float() / scale).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale", scale


def fp8_static(name: str, weight: torch.Tensor) -> Tensors:
    """One scale for the weight and one for what it multiplies with, which is about normally
    distributed: 8 is beyond nearly all of it."""
    yield from fp8_tensor(name, weight)
    yield f"{name}.input_scale", torch.tensor([8 / FP8_MAX])


def fp8_block(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    values = blocks / scale[:, None, :, None]
    yield f"{name}.weight", values.reshape(weight.shape).to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", scale


# --- 4-bit floating point -------------------------------------------------------------------


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Rounds `[..., K]` values to E2M1 and packs two a byte, the even one low: `[..., K / 2]`."""
    middles = (FP4_VALUES[1:] + FP4_VALUES[:-1]) / 2
    codes = torch.bucketize(values.abs(), middles) + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8)


def nvfp4_parts(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Packed values, float8 scales of 16 columns each, and the float32 scale of those scales.

    The last one comes from the expert's number: gate and up projection must share it, and it is
    to differ from expert to expert.
    """
    expert = int(re.search(r"experts\.(\d+)\.", name).group(1))
    outer = (1 + expert % 8 / 8) * weight.shape[1] ** -0.5 / FP8_MAX
    groups = weight.float().unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / FP4_MAX / outer).clamp(2**-6, FP8_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    values = groups / (scale.float() * outer)[..., None]
    return pack_fp4(values.flatten(1)), scale, torch.tensor(outer)


def nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    """As ModelOpt writes it."""
    values, scale, outer = nvfp4_parts(name, weight)
    yield f"{name}.weight", values
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_scale_2", outer
    yield f"{name}.input_scale", torch.tensor(8 / FP4_MAX / FP8_MAX)


def nvfp4_ct(name: str, weight: torch.Tensor) -> Tensors:
    """As compressed-tensors writes it: the outer scales are stored inverted."""
    values, scale, outer = nvfp4_parts(name, weight)
    yield f"{name}.weight_packed", values
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_global_scale", 1 / outer.reshape(1)
    yield f"{name}.input_global_scale", torch.tensor([FP4_MAX * FP8_MAX / 8])


def mxfp4_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `[..., K]`: packed values `[..., K / 32, 16]` and powers of two for 32 columns each,
    as biased exponents `[..., K / 32]` of type uint8."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor().clamp(-125, 127) - 2
    return pack_fp4(groups * torch.exp2(-exponent)[..., None]), (exponent + 127).to(torch.uint8)
