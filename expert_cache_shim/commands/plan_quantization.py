"""How checkpoints store the weight of one linear layer: names, types and shapes.

`plain` and its like return a scheme: a function of a layer's name, rows `N` and columns `K` that
gives its tensors. The formats are those that vLLM loads for the experts of a model.
"""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import CommandError
from .plan_config import Fields

# Bytes of one element, by the names of the safetensors format.
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


# Layers that no method quantises, whether or not the checkpoint names them.
NEVER = ("lm_head", ".gate", ".router", ".shared_expert_gate")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint. count: how many of the same shape there are, of other experts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ELEMENT_BYTES[self.dtype] * self.count


Scheme = Callable[[str, int, int], list[Tensor]]


def plain(dtype: str = "BF16") -> Scheme:
    return lambda name, rows, columns: [Tensor(f"{name}.weight", dtype, (rows, columns))]


def fp8_block(block: tuple[int, int] = (128, 128)) -> Scheme:
    """8-bit floats, a float32 scale for each block."""

    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        scales = (-(-rows // block[0]), -(-columns // block[1]))
        return [
            Tensor(f"{name}.weight", "F8_E4M3", (rows, columns)),
            Tensor(f"{name}.weight_scale_inv", "F32", scales),
        ]

    return tensors


def eight_bit(dtype: str, scales: str, static: bool = False) -> Scheme:
    """One byte a weight; scales: "tensor" or "channel". static: activations have one as well."""

    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        # vLLM keeps the scales of 8-bit weights in float32, whatever the checkpoint has.
        shape = (1,) if scales == "tensor" else (rows, 1)
        found = [
            Tensor(f"{name}.weight", dtype, (rows, columns)),
            Tensor(f"{name}.weight_scale", "F32", shape),
        ]
        return found + ([Tensor(f"{name}.input_scale", "F32", (1,))] if static else [])

    return tensors


def packed(bits: int, group: int, symmetric: bool = True, ordered: bool = False) -> Scheme:
    """compressed-tensors: whole numbers packed along K, a scale for each group of a row; group 0:
    one for each row. ordered: columns are grouped by an index."""

    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        groups = columns // group if group else 1
        found = [
            Tensor(f"{name}.weight_packed", "I32", (rows, columns * bits // 32)),
            Tensor(f"{name}.weight_scale", "BF16", (rows, groups)),
            Tensor(f"{name}.weight_shape", "I64", (2,)),
        ]
        zeros = Tensor(f"{name}.weight_zero_point", "I32", (rows * bits // 32, groups))
        index = Tensor(f"{name}.weight_g_idx", "I32", (columns,))
        return found + ([] if symmetric else [zeros]) + ([index] if ordered else [])

    return tensors


def gptq(bits: int, group: int) -> Scheme:
    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        groups = columns // group if group else 1
        return [
            Tensor(f"{name}.qweight", "I32", (columns * bits // 32, rows)),
            Tensor(f"{name}.scales", "F16", (groups, rows)),
            Tensor(f"{name}.qzeros", "I32", (groups, rows * bits // 32)),
            Tensor(f"{name}.g_idx", "I32", (columns,)),
        ]

    return tensors


def awq(bits: int, group: int) -> Scheme:
    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        groups = columns // group if group else 1
        return [
            Tensor(f"{name}.qweight", "I32", (columns, rows * bits // 32)),
            Tensor(f"{name}.scales", "F16", (groups, rows)),
            Tensor(f"{name}.qzeros", "I32", (groups, rows * bits // 32)),
        ]

    return tensors


def four_bit_float(group: int, weight: str, scalars: tuple[str, ...] = ()) -> Scheme:
    """MXFP4 (groups of 32) and NVFP4 (groups of 16). weight: its name. scalars: the names of
    scales of the whole tensor."""

    def tensors(name: str, rows: int, columns: int) -> list[Tensor]:
        return [
            Tensor(f"{name}.{weight}", "U8", (rows, columns // 2)),
            Tensor(f"{name}.weight_scale", "U8", (rows, columns // group)),
            *(Tensor(f"{name}.{scalar}", "F32", (1,)) for scalar in scalars),
        ]

    return tensors


MXFP4 = four_bit_float(32, "weight_packed")
NVFP4 = four_bit_float(16, "weight_packed", ("weight_global_scale", "input_global_scale"))
MODELOPT_NVFP4 = four_bit_float(16, "weight", ("weight_scale_2", "input_scale"))

COMMON: dict[str, Scheme] = {
    "bf16": plain(),
    "fp8": fp8_block(),
    "int8": eight_bit("I8", "channel"),
    "int4": packed(4, 128),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
"""What a model's experts could be stored as, for comparison and for `--quantization`."""


@dataclass(frozen=True)
class Quantization:
    """label: as the table shows it. scheme_of: the scheme of a linear layer of that name."""

    label: str
    scheme_of: Callable[[str], Scheme]


def quantization_of(config: Fields, dtype: str, foretell: bool) -> Quantization:
    """What a config.json says of its checkpoint. Raises CommandError for a method that is not
    known here, if its tensors are to be foretold and not read."""
    part = config.part("quantization_config") or config.part("compression_config")
    if part is None:
        return Quantization(dtype.lower(), lambda name: plain(dtype))
    method = part.text("quant_method", default="modelopt")
    if not foretell and method not in _METHODS:
        return Quantization(method, lambda name: plain(dtype))
    if method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise part.error("quant_method", method, f"one of {known}, or a checkpoint be beside it")
    return _METHODS[method](part, plain(dtype))


def _fp8(part: Fields, other: Scheme) -> Quantization:
    block = part.wholes("weight_block_size")
    if block and (len(block) != 2 or 0 in block):
        raise part.error("weight_block_size", block, "two whole numbers, 1 or more")
    static = part.text("activation_scheme", default="dynamic") == "static"
    scheme = fp8_block((block[0], block[1])) if block else eight_bit("F8_E4M3", "tensor", static)
    return _unless_named(part, "fp8", scheme, other)


def _gptq(part: Fields, other: Scheme) -> Quantization:
    bits, group = _bits(part), _group(part, "group_size")
    # GPTQModel names exceptions as expressions after a minus.
    left_out = [f"re:{name[2:]}" for name in part.names("dynamic") if name.startswith("-:")]
    return _unless_named(part, f"int{bits}", gptq(bits, group), other, left_out)


def _awq(part: Fields, other: Scheme) -> Quantization:
    bits, group = _bits(part), _group(part, "group_size", "q_group_size")
    return _unless_named(part, f"int{bits}", awq(bits, group), other)


def _modelopt(part: Fields, other: Scheme) -> Quantization:
    algorithm = part.text("quant_algo")
    schemes = {"NVFP4": MODELOPT_NVFP4, "FP8": eight_bit("F8_E4M3", "tensor", True)}
    if algorithm not in schemes:
        raise part.error("quant_algo", algorithm, f"one of {', '.join(schemes)}")
    return _unless_named(part, algorithm.lower(), schemes[algorithm], other)


def _mxfp4(part: Fields, other: Scheme) -> Quantization:
    return _unless_named(part, "mxfp4", MXFP4, other)


def _compressed_tensors(part: Fields, other: Scheme) -> Quantization:
    groups = part.parts("config_groups")
    if not groups:
        raise part.error("config_groups", None, "an object with a group of weights")
    form = part.text("format", default="")
    schemes = [(group.texts("targets"), *_weights(group, form)) for group in groups]
    ignored = _matcher(part.texts("ignore"))

    def scheme_of(name: str) -> Scheme:
        for targets, scheme, _ in schemes:
            if "Linear" in targets or _matcher(targets)(name):
                return other if name.endswith(NEVER) or ignored(name) else scheme
        return other

    experts = "model.layers.0.mlp.experts.0.up_proj"
    named = [label for _, scheme, label in schemes if scheme is scheme_of(experts)]
    return Quantization((named or [schemes[0][2]])[0], scheme_of)


def _weights(group: Fields, form: str) -> tuple[Scheme, str]:
    form = group.text("format", default=form)
    weights = group.part("weights")
    if weights is None:
        raise group.error("weights", None, "an object")
    bits, kind = weights.whole("num_bits"), weights.text("type", default="int")
    strategy = weights.text("strategy", default="tensor")
    size = weights.whole("group_size", low=-1, default=0)
    if kind == "float" and bits == 4:
        return (NVFP4, "nvfp4") if "nvfp4" in form or size == 16 else (MXFP4, "mxfp4")
    if kind == "float" and bits == 8:
        block = weights.wholes("block_structure")
        if len(block) == 2 and 0 not in block:
            return fp8_block((block[0], block[1])), "fp8"
        activations = group.part("input_activations")
        static = activations is not None and activations.says("dynamic", False)
        scales = "tensor" if strategy == "tensor" else "channel"
        return eight_bit("F8_E4M3", scales, static), "fp8"
    if kind == "int" and form == "int-quantized" and bits == 8:
        return eight_bit("I8", "tensor" if strategy == "tensor" else "channel"), "int8"
    if kind == "int" and bits in (2, 4, 8):
        symmetric = weights.flag("symmetric", default=True)
        ordered = weights.says("actorder", "group", True)
        return packed(bits, max(0, size), symmetric, ordered), f"int{bits}"
    raise weights.error("num_bits", bits, "4 or 8, of the type int or float")


_METHODS = {
    "fp8": _fp8, "gptq": _gptq, "gptq_marlin": _gptq, "auto_gptq": _gptq, "awq": _awq,
    "awq_marlin": _awq, "modelopt": _modelopt, "modelopt_fp4": _modelopt, "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}  # fmt: skip


def _bits(part: Fields) -> int:
    bits = part.whole("bits", "w_bit", high=32)
    if bits not in (2, 4, 8):
        raise part.error("bits", bits, "2, 4 or 8")
    return bits


def _group(part: Fields, *names: str) -> int:
    """0 where a scale serves a whole row, which the formats write as -1."""
    return max(0, part.whole(*names, low=-1, default=0))


def _unless_named(
    part: Fields, label: str, scheme: Scheme, other: Scheme, exceptions: Sequence[str] = ()
) -> Quantization:
    named = part.texts("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    left_out = _matcher([*named, *exceptions])

    def scheme_of(name: str) -> Scheme:
        return other if name.endswith(NEVER) or left_out(name) else scheme

    return Quantization(label, scheme_of)


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """The ways in which the formats name layers: `re:` expressions, wildcards, whole names, and
    parts of names between dots."""
    parts = [f".{p}." for p in patterns if not p.startswith("re:") and "*" not in p]
    expressions = [one for pattern in patterns for one in _expressions(pattern)]

    def matches(name: str) -> bool:
        dotted = f".{name}."
        return any(part in dotted for part in parts) or any(one.match(name) for one in expressions)

    return matches


def _expressions(pattern: str) -> list[re.Pattern]:
    texts = []
    if pattern.startswith("re:"):
        texts = [pattern[3:]]
    elif "*" in pattern:
        texts = [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}.*")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that may change
            return [re.compile(text) for text in texts]
    except (re.error, OverflowError, RecursionError):
        shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
        raise CommandError(f"quantization_config: {shown!r} is no expression") from None
