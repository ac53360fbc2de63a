"""What a config.json says of a model: the tensors of its checkpoint, its experts, its KV cache.

Names and shapes are those of the published checkpoints, so that a config.json and the headers of
a checkpoint go the same way from here on. Families differ in few places; `FAMILIES` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .plan_config import Fields
from .plan_quantization import MXFP4, Quantization, Scheme, Tensor, quantization_of

MAX_EXPERTS = 1024  # what the kernels take; above it the cache refuses the layer
DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "auto": "BF16"}


@dataclass(frozen=True)
class KvLayers:
    """Attention layers of one kind. elements: of one token in one layer, key and value together,
    and of one of its `heads`. heads 0: latent attention, which every rank holds whole. window:
    tokens that a sliding layer keeps, 0 where it keeps all."""

    layers: int
    elements: int
    heads: int
    window: int = 0


@dataclass(frozen=True)
class Model:
    """state: elements that every sequence keeps beside its tokens, in layers of linear attention.
    folded: elements of the copies that vLLM makes of latent attention's projections."""

    kind: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    quantization: Quantization
    family: Family
    moe_layers: tuple[int, ...]
    kv: tuple[KvLayers, ...]
    state: int = 0
    folded: int = 0
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Family:
    """Where models of one `model_type` differ."""

    experts: str
    """The field with the number of experts."""
    attention: Callable[[Writer], None]
    inner: str = "moe_intermediate_size"
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    fused: bool = False
    """The experts of a layer are one tensor, with biases, in MXFP4 (gpt-oss)."""
    router_correction: bool = False
    sliding: tuple[str, ...] = ("full_attention",)
    """The kinds of attention, layer by layer, repeated, where the config does not list them."""


def describe(config: Fields, foretell: bool = True) -> Model:
    """Raises CommandError, naming the field, for what is no model that is known here. foretell:
    whether the checkpoint's tensors are asked of the config; False where they can be read."""
    inner = config.part("text_config")
    config = inner if inner is not None else config
    kind = config.text("model_type")
    if kind not in FAMILIES:
        raise config.error("model_type", kind, f"one of {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    dtype = DTYPES.get(config.text("torch_dtype", "dtype", default="auto"), "BF16")
    writer = Writer(config, family, quantization_of(config, dtype, foretell))
    moe_layers = tuple(writer.layer(index) for index in range(writer.layers))
    writer.ends()
    return Model(
        kind=kind, layers=writer.layers, experts=writer.experts, top_k=writer.top_k,
        hidden=writer.hidden, inner=writer.inner, heads=writer.heads, kv_heads=writer.kv_heads,
        vocabulary=writer.vocabulary,
        context=config.whole("max_position_embeddings", high=2**40, default=0),
        quantization=writer.quantization, family=family,
        moe_layers=tuple(index for index, moe in enumerate(moe_layers) if moe),
        kv=writer.kv_layers(), state=writer.state, folded=writer.folded,
        tensors=tuple(writer.tensors),
    )  # fmt: skip


class Writer:
    """Writes the tensors of a checkpoint down, layer by layer."""

    def __init__(self, config: Fields, family: Family, quantization: Quantization) -> None:
        self.config, self.family, self.quantization = config, family, quantization
        self.layers = config.whole("num_hidden_layers", high=1024)
        self.hidden = config.whole("hidden_size")
        self.experts = config.whole(family.experts, low=2, high=MAX_EXPERTS)
        self.top_k = config.whole("num_experts_per_tok", high=self.experts)
        self.inner = config.whole(family.inner)
        self.heads = config.whole("num_attention_heads", high=65536)
        self.kv_heads = config.whole("num_key_value_heads", high=65536, default=self.heads)
        self.head_size = config.whole("head_dim", default=max(1, self.hidden // self.heads))
        self.vocabulary = config.whole("vocab_size")
        self.windows = _windows(config, family, self.layers)
        self.tensors: list[Tensor] = []
        self.state = self.folded = 0
        self._kv: dict[tuple[int, int, int], int] = {}
        self._prefix = ""
        self.index = 0

    # What a layer is written with.

    def vector(self, name: str, size: int, dtype: str = "BF16") -> None:
        self.tensors.append(Tensor(self._prefix + name, dtype, (size,)))

    def tensor(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensors.append(Tensor(self._prefix + name, "BF16", shape))

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        name = self._prefix + name
        self.tensors += self.quantization.scheme_of(name)(name, rows, columns)
        if bias:
            self.tensors.append(Tensor(f"{name}.bias", "BF16", (rows,)))

    def keeps(self, elements: int, heads: int) -> None:
        """The KV cache of the present layer."""
        key = (elements, heads, self.windows[self.index])
        self._kv[key] = self._kv.get(key, 0) + 1

    def kv_layers(self) -> tuple[KvLayers, ...]:
        return tuple(
            KvLayers(layers, elements, heads, window)
            for (elements, heads, window), layers in self._kv.items()
        )

    # The parts of a model.

    def layer(self, index: int) -> bool:
        """One layer; whether it has experts."""
        self.index, self._prefix = index, f"model.layers.{index}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            self.vector(name, self.hidden)
        self.family.attention(self)
        moe = self._has_experts(index)
        if moe:
            self._experts()
        else:
            self._gated(self.family.block, self.config.whole("intermediate_size"))
        return moe

    def ends(self) -> None:
        self._prefix = ""
        embedding = (self.vocabulary, self.hidden)
        self.tensors.append(Tensor("model.embed_tokens.weight", "BF16", embedding))
        if not self.config.flag("tie_word_embeddings"):
            self.tensors.append(Tensor("lm_head.weight", "BF16", embedding))
        self.vector("model.norm.weight", self.hidden)

    def _has_experts(self, index: int) -> bool:
        config = self.config
        return (
            index >= config.whole("first_k_dense_replace", low=0, default=0)
            and index % config.whole("moe_layer_freq", default=1) == 0
            and (index + 1) % config.whole("decoder_sparse_step", default=1) == 0
            and index not in config.wholes("mlp_only_layers")
        )

    def _gated(self, block: str, inner: int) -> None:
        for name in ("gate_proj", "up_proj"):
            self.linear(f"{block}.{name}", inner, self.hidden)
        self.linear(f"{block}.down_proj", self.hidden, inner)

    def _experts(self) -> None:
        config, block, family = self.config, self.family.block, self.family
        self.linear(f"{block}.{family.router}", self.experts, self.hidden, bias=family.fused)
        if family.router_correction or config.text("topk_method", default="") == "noaux_tc":
            self.vector(f"{block}.{family.router}.e_score_correction_bias", self.experts, "F32")
        shared = config.whole("n_shared_experts", low=0, default=0)
        if shared:
            self._gated(f"{block}.shared_experts", shared * self.inner)
        inner = config.whole("shared_expert_intermediate_size", low=0, default=0)
        if inner:
            self._gated(f"{block}.shared_expert", inner)
            self.linear(f"{block}.shared_expert_gate", 1, self.hidden)
        prefix = f"{self._prefix}{block}.experts"
        scheme = self.quantization.scheme_of(f"{prefix}.0.{family.projections[1]}")
        self.tensors += expert_tensors(
            family, self.experts, self.hidden, self.inner, prefix, scheme
        )  # fmt: skip


def expert_tensors(
    family: Family, experts: int, hidden: int, inner: int, prefix: str, scheme: Scheme
) -> Iterator[Tensor]:
    """The experts of one layer as a scheme stores them, one tensor for all experts of a kind."""
    if not family.fused:
        for name, rows, columns in zip(
            family.projections, (inner, inner, hidden), (hidden, hidden, inner)
        ):
            for tensor in scheme(f"{prefix}.0.{name}", rows, columns):
                yield Tensor(tensor.name, tensor.dtype, tensor.shape, experts)
        return
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        if scheme is MXFP4:
            groups = (experts, rows, columns // 32)
            yield Tensor(f"{prefix}.{name}_blocks", "U8", (*groups, 16))
            yield Tensor(f"{prefix}.{name}_scales", "U8", groups)
        elif len(parts := scheme(f"{prefix}.0.{name}", rows, columns)) == 1:  # not quantised
            yield Tensor(f"{prefix}.{name}", parts[0].dtype, (experts, columns, rows))
        else:
            yield from (Tensor(t.name, t.dtype, t.shape, experts) for t in parts)
        yield Tensor(f"{prefix}.{name}_bias", "BF16", (experts, rows))


def _windows(config: Fields, family: Family, layers: int) -> list[int]:
    """For each layer the tokens that its attention looks back; 0: all."""
    window = config.whole("sliding_window", low=0, default=0)
    kinds = config.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise config.error("layer_types", kinds, f"a list of num_hidden_layers ({layers}) texts")
    if not kinds:
        kinds = [family.sliding[index % len(family.sliding)] for index in range(layers)]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def grouped(
    qkv_bias: str = "", out_bias: str = "", norm: str = "", sinks: bool = False, gate: bool = False
) -> Callable[[Writer], None]:
    """Attention with grouped keys. qkv_bias, out_bias: the field that says whether there is one,
    or "always". norm: "head" or "all", what queries and keys are normalised over; "use_qk_norm":
    the field of that name says whether by head. gate: queries carry a gate of the same size."""

    def write(writer: Writer) -> None:
        config, size, hidden = writer.config, writer.head_size, writer.hidden
        has = {"": False, "always": True}
        bias = has[qkv_bias] if qkv_bias in has else config.flag(qkv_bias, qkv_bias == "qkv_bias")
        queries, keys = writer.heads * size, writer.kv_heads * size
        writer.linear("self_attn.q_proj", queries * (2 if gate else 1), hidden, bias)
        writer.linear("self_attn.k_proj", keys, hidden, bias)
        writer.linear("self_attn.v_proj", keys, hidden, bias)
        bias = has[out_bias] if out_bias in has else config.flag(out_bias)
        writer.linear("self_attn.o_proj", hidden, queries, bias)
        by_head = norm == "head" or (norm == "use_qk_norm" and config.flag(norm))
        if by_head or norm == "all":
            writer.vector("self_attn.q_norm.weight", size if by_head else queries)
            writer.vector("self_attn.k_norm.weight", size if by_head else keys)
        if sinks:
            writer.vector("self_attn.sinks", writer.heads)
        writer.keeps(2 * size, writer.kv_heads)

    return write


def latent(writer: Writer) -> None:
    """Multi-head latent attention. vLLM keeps the projections that it folds into queries and
    outputs a second time, in 16 bits."""
    config, hidden, heads = writer.config, writer.hidden, writer.heads
    rank, rope = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    nope, value = config.whole("qk_nope_head_dim"), config.whole("v_head_dim")
    queries = config.whole("q_lora_rank", low=0, default=0)
    if queries:
        writer.linear("self_attn.q_a_proj", queries, hidden)
        writer.vector("self_attn.q_a_layernorm.weight", queries)
        writer.linear("self_attn.q_b_proj", heads * (nope + rope), queries)
    else:
        writer.linear("self_attn.q_proj", heads * (nope + rope), hidden)
    writer.linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden)
    writer.vector("self_attn.kv_a_layernorm.weight", rank)
    writer.linear("self_attn.kv_b_proj", heads * (nope + value), rank)
    writer.linear("self_attn.o_proj", hidden, heads * value)
    writer.keeps(rank + rope, 0)
    writer.folded += heads * (nope + value) * rank


def gated_delta(writer: Writer) -> None:
    """Qwen3-Next: every so many layers one of full attention, the others linear."""
    config, hidden = writer.config, writer.hidden
    every = config.whole("full_attention_interval", default=4)
    kinds = config.texts("layer_types")
    full = kinds[writer.index] == "full_attention" if kinds else (writer.index + 1) % every == 0
    if full:
        grouped(qkv_bias="attention_bias", norm="head", gate=True)(writer)
        return
    key_heads, value_heads = (
        config.whole(f"linear_num_{kind}_heads", high=65536) for kind in ("key", "value")
    )
    value_size = config.whole("linear_value_head_dim")
    keys = key_heads * config.whole("linear_key_head_dim")
    values = value_heads * value_size
    taps = config.whole("linear_conv_kernel_dim", high=1024)
    writer.linear("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    writer.linear("linear_attn.in_proj_ba", 2 * value_heads, hidden)
    writer.tensor("linear_attn.conv1d.weight", (2 * keys + values, 1, taps))
    writer.vector("linear_attn.dt_bias", value_heads)
    writer.vector("linear_attn.A_log", value_heads)
    writer.vector("linear_attn.norm.weight", value_size)
    writer.linear("linear_attn.out_proj", hidden, values)
    writer.state += (2 * keys + values) * (taps - 1) + values * config.whole("linear_key_head_dim")


FAMILIES = {
    "deepseek_v2": Family("n_routed_experts", latent),
    "deepseek_v3": Family("n_routed_experts", latent),
    "kimi_k2": Family("n_routed_experts", latent),
    "glm4_moe": Family(
        "n_routed_experts", grouped("attention_bias", norm="use_qk_norm"), router_correction=True
    ),
    "gpt_oss": Family(
        "num_local_experts", grouped("always", "always", sinks=True), inner="intermediate_size",
        router="router", fused=True, sliding=("sliding_attention", "full_attention"),
    ),
    "mixtral": Family(
        "num_local_experts", grouped(), inner="intermediate_size", block="block_sparse_moe",
        projections=("w1", "w3", "w2"), sliding=("sliding_attention",),
    ),
    "olmoe": Family(
        "num_experts", grouped("attention_bias", "attention_bias", norm="all"),
        inner="intermediate_size",
    ),
    "qwen2_moe": Family("num_experts", grouped("qkv_bias")),
    "qwen3_moe": Family("num_experts", grouped("attention_bias", "attention_bias", norm="head")),
    "qwen3_next": Family("num_experts", gated_delta),
}  # fmt: skip
"""By `model_type`."""
