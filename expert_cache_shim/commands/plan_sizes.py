"""What one tensor-parallel rank holds of a checkpoint: records of experts, and the rest.

vLLM splits experts along their intermediate size, attention by heads, the embeddings by words;
router, norms and the down-projections of latent attention are whole on every rank.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layout import round_up
from . import CommandError
from .plan_families import Model, expert_tensors
from .plan_quantization import ELEMENT_BYTES, Scheme, Tensor

_EXPERT = re.compile(
    r".*\blayers\.(?P<index>\d+)\.(?:.*\.)?experts\.(?:(?P<expert>\d+)\.)?"
    r"(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|w[123])[._]?(?P<kind>.*)"
)
_DOWN = ("down_proj", "w2")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_UNUSED = re.compile(r"^(model\.)?mtp\.|rotary_emb")
_WHOLE = re.compile(
    r"norm|\.(gate|router|q_a_proj|kv_a_proj_with_mqa|shared_expert_gate)\."
    r"|\.(o_proj|down_proj)\.bias$|input_scale|global_scale"
)
_KEYS = re.compile(r"\.(k_proj|v_proj)\.")
_WORDS = re.compile(r"\b(embed_tokens|lm_head)\.weight$")
WORDS_OF = 64  # vLLM pads the vocabulary to a multiple
FLOATS = ("F64", "F32", "F16", "BF16")
# Marlin, the MXFP4 kernel whose layers can be armed, pads the sizes of an expert to these.
MXFP4_INNER, MXFP4_HIDDEN, MXFP4_GROUP = 128, 256, 32


@dataclass(frozen=True)
class Record:
    """One per-expert tensor of a layer: its name, and bytes of one expert on one rank."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Shape:
    """Layers whose experts are stored alike."""

    layers: int
    records: tuple[Record, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(record.nbytes for record in self.records)


@dataclass(frozen=True)
class Sizes:
    """Of one rank. experts: how many of each layer it holds. shapes: its layers with experts.
    rest: bytes of all other weights."""

    experts: int
    shapes: tuple[Shape, ...]
    rest: int
    embedding: int
    """The part of `rest` of which a step reads a few rows only."""

    @property
    def layers(self) -> int:
        return sum(shape.layers for shape in self.shapes)

    @property
    def one_of_each(self) -> int:
        """Bytes of one expert in every layer: what one more slot costs."""
        return sum(shape.layers * shape.nbytes for shape in self.shapes)


def require_divisible(model: Model, ranks: int, by_expert: bool = False) -> None:
    """Raises CommandError for a number of ranks that vLLM refuses. by_expert: experts are dealt
    out whole (expert parallelism)."""
    sizes = {"num_attention_heads": model.heads}
    if by_expert:
        sizes[model.family.experts] = model.experts
    elif not model.family.fused:
        sizes[model.family.inner] = model.inner
    for name, size in sizes.items():
        if size % ranks:
            raise CommandError(f"--tensor-parallel-size {ranks}: {name} is {size}, no multiple")
    if model.kv_heads % ranks and ranks % model.kv_heads and any(kv.heads for kv in model.kv):
        raise CommandError(
            f"--tensor-parallel-size {ranks}: num_key_value_heads is {model.kv_heads}, neither a "
            "multiple nor a divisor"
        )


def sizes_of(model: Model, tensors: Iterable[Tensor], ranks: int, by_expert: bool = False) -> Sizes:
    """tensors: those of a whole checkpoint. by_expert: each rank has some experts whole, else a
    part of every one. Raises CommandError where experts are missing."""
    rest = embedding = 0
    by_layer: dict[int, list[tuple[re.Match, Tensor]]] = defaultdict(list)
    for tensor in tensors:
        expert = _EXPERT.fullmatch(tensor.name)
        layer = _LAYER.search(tensor.name)
        if _UNUSED.search(tensor.name) or (layer and int(layer[1]) >= model.layers):
            continue  # of a draft model that is loaded only with speculative decoding
        if expert:
            by_layer[int(expert["index"])].append((expert, tensor))
            continue
        size = _on_rank(model, tensor, ranks)
        rest += size
        embedding += size if "embed_tokens" in tensor.name else 0
    if sorted(by_layer) != list(model.moe_layers):
        wanted = set(model.moe_layers) ^ set(by_layer)
        raise CommandError(
            f"layer {min(wanted)}: config.json and the checkpoint do not agree on which layers "
            "have experts; give the config.json that belongs to it"
        )
    split = 1 if by_expert else ranks
    shapes = Counter(
        tuple(_records(model, layer, by_layer[layer], split)) for layer in sorted(by_layer)
    )
    rest += 2 * -(-model.folded // ranks)
    held = model.experts // ranks if by_expert else model.experts
    found = tuple(Shape(layers, records) for records, layers in shapes.items())
    return Sizes(held, found, rest, embedding)


def shape_of(model: Model, scheme: Scheme, ranks: int) -> Shape:
    """What the experts would be in another scheme."""
    prefix = "model.layers.0.mlp.experts"
    tensors = expert_tensors(
        model.family, model.experts, model.hidden, model.inner, prefix, scheme
    )  # fmt: skip
    matched = [(_EXPERT.fullmatch(tensor.name), tensor) for tensor in tensors]
    return Shape(len(model.moe_layers), tuple(_records(model, 0, matched, ranks)))


def _records(model: Model, layer: int, found: list, ranks: int) -> list[Record]:
    """The records of one expert, as vLLM joins them: gate and up in one tensor."""
    sums: dict[str, int] = defaultdict(int)
    halves: dict[str, int] = defaultdict(int)
    padded = any(match["kind"] == "blocks" for match, _ in found)
    for match, tensor in found:
        down = match["projection"] in _DOWN
        name = f"{'w2' if down else 'w13'}_{match['kind'] or 'weight'}"
        held, *shape = (tensor.count, *tensor.shape) if match["expert"] else tensor.shape or (0,)
        halves[name] += held * (2 if down or match["projection"] == "gate_up_proj" else 1)
        count = _padded_mxfp4(model, len(shape), down, ranks) if padded else (
            _expert_elements(tensor.name, shape, down, ranks)
        )  # fmt: skip
        sums[name] += held * count * ELEMENT_BYTES[tensor.dtype]
    for name, count in halves.items():
        if count != 2 * model.experts:
            raise CommandError(
                f"layer {layer}: {name} of {count / 2:g} of {model.experts} experts; the "
                "checkpoint is not whole, or belongs to another config.json"
            )
    return [Record(name, size // model.experts) for name, size in sorted(sums.items())]


def _expert_elements(name: str, shape: Sequence[int], down: bool, ranks: int) -> int:
    """Elements of one expert's part of one tensor on one rank."""
    split = True
    if len(shape) < 2 or min(shape) == 1:
        # A value for each output, of which the down-projection has all on every rank.
        split = not down and max(shape, default=1) > 1 and not name.endswith(("g_idx", "_shape"))
    count = math.prod(shape)
    return -(-count // ranks) if split else count


def _padded_mxfp4(model: Model, dimensions: int, down: bool, ranks: int) -> int:
    """Elements as the kernel has them: a rank gets whole groups of 32, then sizes are padded.
    dimensions of one expert's tensor: 3 of the packed weight, 2 of the scales, 1 of the bias."""
    groups = -(-model.inner // MXFP4_GROUP)
    inner = round_up(-(-groups // ranks) * MXFP4_GROUP, MXFP4_INNER)
    hidden = round_up(model.hidden, MXFP4_HIDDEN)
    rows, columns = (hidden, inner) if down else (2 * inner, hidden)
    return rows * {1: 1, 2: columns // MXFP4_GROUP, 3: columns // 2}.get(dimensions, 1)


def _on_rank(model: Model, tensor: Tensor, ranks: int) -> int:
    """Bytes of a tensor that is no expert's. Float weights are loaded in 16 bits."""
    floats = tensor.dtype in FLOATS and tensor.name.endswith((".weight", ".bias"))
    size = 2 if floats else ELEMENT_BYTES[tensor.dtype]
    count = tensor.numel * tensor.count
    if _WHOLE.search(tensor.name) or tensor.numel == 1:
        return count * size
    if _WORDS.search(tensor.name):
        words = round_up(tensor.shape[0], WORDS_OF) * (count // max(1, tensor.shape[0]))
        return -(-words // ranks) * size
    if _KEYS.search(tensor.name):
        ranks = min(ranks, model.kv_heads)
    return -(-count // ranks) * size
