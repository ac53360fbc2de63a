"""What one rank holds, against values worked out by hand."""

import pytest
from model_configs import NAMES, model

from expert_cache_shim.commands import CommandError
from expert_cache_shim.commands.plan_quantization import COMMON, Tensor
from expert_cache_shim.commands.plan_sizes import require_divisible, shape_of, sizes_of


def sizes(described, ranks=1):
    return sizes_of(described, described.tensors, ranks)


# One expert of one layer: gate and up `[2 * inner, hidden]`, down `[hidden, inner]`.
EXPERT = {
    "qwen3-30b-a3b": 3 * 768 * 2048 * 2,
    "qwen3-next-80b-a3b": 3 * 512 * 2048 * 2,
    "mixtral-8x7b": 3 * 14336 * 4096 * 2,
    "deepseek-v2-lite": 3 * 1408 * 2048 * 2,
    # 8-bit floats, and a float32 scale for each block of 128 x 128.
    "deepseek-v3": 3 * 2048 * 7168 + 4 * 3 * (2048 // 128) * (7168 // 128),
    "olmoe-1b-7b": 3 * 1024 * 2048 * 2,
    "glm-4.5-air": 3 * 1408 * 4096 * 2,
    "glm-4.5": 3 * 1536 * 5120 * 2,
    # 2880 is padded to 3072 and 2944; half a byte a weight, a byte for 32 of them, 16-bit biases.
    "gpt-oss-120b": (
        5888 * 3072 // 2 + 5888 * 3072 // 32 + 5888 * 2
        + 3072 * 2944 // 2 + 3072 * 2944 // 32 + 3072 * 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERT)
def test_bytes_of_an_expert(name):
    (shape,) = sizes(model(name)).shapes
    assert shape.nbytes == EXPERT[name]
    assert shape.layers == len(model(name).moe_layers)


@pytest.mark.parametrize("name", [n for n in EXPERT if not n.startswith("gpt-oss")])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_an_expert(name, ranks):
    (shape,) = sizes(model(name), ranks).shapes
    assert shape.nbytes * ranks == EXPERT[name]


def test_ranks_of_mxfp4_get_whole_groups_and_pad_them():
    # 2880 are 90 groups of 32: 45 for each of two ranks, padded from 1440 to 1536.
    inner, hidden = 1536, 3072
    weights = 3 * inner * hidden // 2 + 3 * inner * hidden // 32
    (shape,) = sizes(model("gpt-oss-120b"), 2).shapes
    assert shape.nbytes == weights + 2 * (2 * inner + hidden)
    # 23 groups for the largest of four ranks, padded from 736 to 768.
    inner = 768
    weights = 3 * inner * hidden // 2 + 3 * inner * hidden // 32
    (shape,) = sizes(model("gpt-oss-120b"), 4).shapes
    assert shape.nbytes == weights + 2 * (2 * inner + hidden)


def test_a_down_projection_keeps_whole_scales_by_output_on_every_rank():
    described = model("qwen3-30b-a3b")
    one, two = (shape_of(described, COMMON["int8"], ranks) for ranks in (1, 2))
    found = {record.name: record.nbytes for record in two.records}
    assert one.nbytes == 3 * 768 * 2048 + 4 * (2 * 768 + 2048)
    assert found == {
        "w13_weight": 2 * 384 * 2048, "w13_weight_scale": 4 * 2 * 384,
        "w2_weight": 2048 * 384, "w2_weight_scale": 4 * 2048,
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind, nbytes",
    [
        ("bf16", 3 * 768 * 2048 * 2),
        ("fp8", 3 * 768 * 2048 + 4 * 3 * 6 * 16),
        ("int8", 3 * 768 * 2048 + 4 * (2 * 768 + 2048)),
        # Half a byte, a 16-bit scale for 128 weights, and the shape as two whole numbers.
        ("int4", 3 * 768 * 2048 // 2 + 2 * 3 * 768 * 2048 // 128 + 3 * 16),
        ("mxfp4", 3 * 768 * 2048 // 2 + 3 * 768 * 2048 // 32),
        ("nvfp4", 3 * 768 * 2048 // 2 + 3 * 768 * 2048 // 16 + 3 * 2 * 4),
    ],
)
def test_an_expert_by_type(kind, nbytes):
    assert shape_of(model("qwen3-30b-a3b"), COMMON[kind], 1).nbytes == nbytes


def test_what_is_no_expert_of_qwen3():
    hidden, words, layers = 2048, 151936, 48
    attention = hidden * (32 * 128 + 2 * 4 * 128 + 32 * 128)
    router, norms = 128 * hidden, 2 * hidden + 2 * 128
    whole = sizes(model("qwen3-30b-a3b"))
    assert whole.embedding == words * hidden * 2
    assert whole.rest == 2 * (2 * words * hidden + hidden + layers * (attention + router + norms))
    # Eight ranks: 4 key heads are held by two ranks each; router and norms by all.
    attention = hidden * (4 * 128 + 2 * 1 * 128 + 4 * 128)
    rest = 2 * (2 * words * hidden // 8 + hidden + layers * (attention + router + norms))
    assert sizes(model("qwen3-30b-a3b"), 8).rest == rest


def test_what_is_no_expert_of_deepseek_v2_lite():
    hidden, words, heads, latent = 2048, 102400, 16, 512
    down = hidden * (latent + 64)  # to the latent: on every rank
    split = hidden * heads * 192 + latent * heads * 256 + heads * 128 * hidden
    folded = heads * 256 * latent
    norms = 2 * hidden + latent
    dense, shared = 3 * hidden * 10944, 3 * hidden * 2 * 1408
    for ranks in (1, 2, 8):
        layers = 27 * (down + norms) + 27 * (split + folded) // ranks
        moe = 26 * (shared // ranks + 64 * hidden)
        rest = 2 * (2 * words * hidden // ranks + hidden + layers + dense // ranks + moe)
        assert sizes(model("deepseek-v2-lite"), ranks).rest == rest


@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_hold_a_little_more_than_one(name):
    described = model(name)
    one, four = sizes(described).rest, sizes(described, 4).rest
    assert one < 4 * four < 1.6 * one


def test_tied_embeddings_are_held_once():
    described = model("qwen3-30b-a3b")
    tied = model("qwen3-30b-a3b", tie_word_embeddings=True)
    assert sizes(described).rest - sizes(tied).rest == 151936 * 2048 * 2


def test_a_draft_model_in_the_checkpoint_is_not_loaded():
    described = model("deepseek-v3")
    draft = [Tensor("model.layers.61.mlp.experts.0.up_proj.weight", "F8_E4M3", (2048, 7168)),
             Tensor("model.layers.61.eh_proj.weight", "BF16", (7168, 14336)),
             Tensor("mtp.fc.weight", "BF16", (7168, 14336))]  # fmt: skip
    assert sizes_of(described, [*described.tensors, *draft], 1) == sizes(described)


def test_float32_weights_are_loaded_in_16_bits_and_corrections_are_not():
    described = model("deepseek-v3", quantization_config=None)
    wide = [
        Tensor(t.name, "F32" if t.dtype == "BF16" else t.dtype, t.shape, t.count)
        for t in described.tensors
        if ".experts." not in t.name
    ]
    experts = [t for t in described.tensors if ".experts." in t.name]
    assert sizes_of(described, [*wide, *experts], 1) == sizes(described)


@pytest.mark.parametrize("change", ["one missing", "one more", "layer missing"])
def test_a_checkpoint_of_another_model_is_noticed(change):
    described = model("qwen3-30b-a3b")
    tensors = []
    for tensor in described.tensors:
        count = tensor.count
        if ".layers.7.mlp.experts." in tensor.name:
            if change == "layer missing":
                continue
            count += {"one missing": -1, "one more": 1}[change] if "down" in tensor.name else 0
        tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, count))
    with pytest.raises(CommandError, match=r"layer 7: .*(128 experts|do not agree)") as refusal:
        sizes_of(described, tensors, 1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name, ranks, said",
    [
        ("qwen3-30b-a3b", 3, "num_attention_heads is 32, no multiple"),
        ("glm-4.5-air", 12, "moe_intermediate_size is 1408, no multiple"),
        ("glm-4.5-air", 6, "moe_intermediate_size is 1408, no multiple"),
        ("qwen3-30b-a3b", 16, None),
        ("gpt-oss-120b", 64, None),
        ("deepseek-v3", 16, None),
    ],
)
def test_ranks_that_vllm_refuses(name, ranks, said):
    if said is None:
        require_divisible(model(name), ranks)
        return
    with pytest.raises(CommandError, match=f"--tensor-parallel-size {ranks}: {said}"):
        require_divisible(model(name), ranks)


def test_ranks_of_expert_parallelism_have_whole_experts():
    described = model("qwen3-30b-a3b")
    whole, parts = (sizes_of(described, described.tensors, 4, by) for by in (True, False))
    assert (whole.experts, parts.experts) == (32, 128)
    assert whole.shapes == sizes(described).shapes
    assert whole.rest == parts.rest
    require_divisible(model("gpt-oss-20b"), 32, by_expert=True)
    with pytest.raises(CommandError, match="num_experts is 128, no multiple"):
        require_divisible(model("qwen3-30b-a3b", num_attention_heads=36), 12, by_expert=True)
