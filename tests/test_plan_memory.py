"""Device and host memory, against the real allocator and values worked out by hand."""

import re

import pytest
from model_configs import model
from start_up import ROOT

from expert_cache_shim import layout
from expert_cache_shim.commands import plan_memory
from expert_cache_shim.commands.plan_memory import (
    Load,
    cache_memory,
    fixed_memory,
    host_memory,
    kv_of_sequence,
    kv_of_token,
    most_slots,
)
from expert_cache_shim.commands.plan_sizes import Record, Shape, sizes_of

MIB = 2**20


def load(context=8192, streams=1, ranks=1, kv_bytes=2):
    return Load(context, streams, ranks, 2048, kv_bytes)


# --- KV cache -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, ranks, nbytes",
    [
        ("qwen3-30b-a3b", 1, 48 * 2 * 4 * 128 * 2),
        ("qwen3-30b-a3b", 2, 48 * 2 * 2 * 128 * 2),
        ("qwen3-30b-a3b", 8, 48 * 2 * 1 * 128 * 2),  # four key heads: each on two ranks
        ("mixtral-8x7b", 1, 32 * 2 * 8 * 128 * 2),
        ("mixtral-8x7b", 8, 32 * 2 * 1 * 128 * 2),
        ("olmoe-1b-7b", 1, 16 * 2 * 16 * 128 * 2),
        ("glm-4.5", 1, 92 * 2 * 8 * 128 * 2),
        ("glm-4.5-air", 4, 46 * 2 * 2 * 128 * 2),
        ("deepseek-v2-lite", 1, 27 * 576 * 2),
        ("deepseek-v3", 1, 61 * 576 * 2),
        ("deepseek-v3", 8, 61 * 576 * 2),  # every rank holds the latent whole
        ("gpt-oss-120b", 1, 18 * 2 * 8 * 64 * 2),  # half of the layers look back 128 tokens
        ("gpt-oss-20b", 1, 12 * 2 * 8 * 64 * 2),
        ("qwen3-next-80b-a3b", 1, 12 * 2 * 2 * 256 * 2),
    ],
)
def test_kv_cache_of_a_token(name, ranks, nbytes):
    assert kv_of_token(model(name), load(ranks=ranks)) == nbytes
    assert kv_of_token(model(name), load(ranks=ranks, kv_bytes=1)) == nbytes // 2


def test_a_sequence_takes_whole_blocks():
    token = kv_of_token(model("mixtral-8x7b"), load())
    assert kv_of_sequence(model("mixtral-8x7b"), load(context=8192)) == 8192 * token
    assert kv_of_sequence(model("mixtral-8x7b"), load(context=8193)) == 8208 * token


def test_a_sliding_layer_keeps_its_window_and_a_step():
    layer = 2 * 8 * 64 * 2
    # 127 tokens before and 2048 of a step are 136 blocks of 16, and one that began before.
    windows, whole = 18 * (137 * 16) * layer, 18 * 32768 * layer
    assert kv_of_sequence(model("gpt-oss-120b"), load(context=32768)) == windows + whole
    # A short sequence does not fill the window.
    assert kv_of_sequence(model("gpt-oss-120b"), load(context=64)) == 18 * (80 + 64) * layer


def test_linear_layers_keep_a_state_whatever_the_length():
    described = model("qwen3-next-80b-a3b")
    short, long = (kv_of_sequence(described, load(context=c)) for c in (16, 32))
    assert long - short == 16 * kv_of_token(described, load())
    assert short == 16 * kv_of_token(described, load()) + 2 * described.state


# --- Slots and overflow rows ----------------------------------------------------------------

SHAPES = {
    "large": (Shape(3, (Record("w13_weight", 3 * MIB), Record("w2_weight", 3 * MIB // 2))),),
    "odd": (Shape(2, (Record("w13_weight", 700_000), Record("w2_weight", 350_000))),),
    "equal tensors share nothing inside a layer": (
        Shape(2, (Record("w13_weight", 700_000), Record("w2_weight", 700_000))),
    ),
    "with scales": (
        Shape(2, (Record("w13_weight", MIB), Record("w13_scale", 65_532),
                  Record("w2_weight", MIB // 2), Record("w2_scale", 65_536))),
    ),
    "two shapes that share what is alike": (
        Shape(2, (Record("w13_weight", 700_000), Record("w2_weight", 350_000))),
        Shape(1, (Record("w13_weight", 700_000), Record("w2_weight", 500_000))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("experts, slots", [(8, 1), (8, 3), (8, 7), (5, 4)])
def test_the_allocator_takes_what_is_foretold(host_library, monkeypatch, name, experts, slots):
    torch = pytest.importorskip("torch")
    from expert_cache_shim.discovery import ExpertTensors
    from expert_cache_shim.storage import Allocator

    monkeypatch.setattr(host_library, "granularity", lambda device: plan_memory.GRANULARITY)
    allocator = Allocator(host_library, torch.device("cpu"))
    made = []
    for shape in SHAPES[name]:
        for _ in range(shape.layers):
            tensors = ExpertTensors(experts)
            for record in shape.records:
                tensors.add(torch.empty(experts, record.nbytes, dtype=torch.uint8))
            made.append(tensors)

    def taken(storages):
        return sum(s.private for s in storages), sum(s.shared for s in storages)

    one = [allocator.virtual(tensors, slots) for tensors in made]
    assert cache_memory(SHAPES[name], experts, slots) == taken(one)
    del one
    two = [allocator.virtual(tensors, slots, region=n % 2) for n, tensors in enumerate(made)]
    if len(SHAPES[name]) == 1:
        assert cache_memory(SHAPES[name], experts, slots, regions=2) == taken(two)
    plain = [allocator.plain(tensors, slots, scratch=False) for tensors in made]
    assert cache_memory(SHAPES[name], experts, slots, regions=0) == taken(plain)


def test_slots_and_overflow_rows_of_qwen3_by_hand():
    described = model("qwen3-30b-a3b")
    shapes = sizes_of(described, described.tensors, 1).shapes
    # Records of 6 and 3 MiB. 33 rows of 3 MiB are 99 MiB, in pieces of 2 MiB 100.
    assert cache_memory(shapes, 128, 33) == (48 * (198 + 100) * MIB, (768 - 198 + 384 - 100) * MIB)
    _, shared = cache_memory(shapes, 128, 33, regions=2)
    assert shared == 2 * (768 - 198 + 384 - 100) * MIB


@pytest.mark.parametrize("room", [0, 10 * MIB, 500 * MIB, 5000 * MIB, 10**12])
@pytest.mark.parametrize("regions", [0, 1, 2])
def test_the_most_slots_fit_and_one_more_does_not(room, regions):
    shapes, experts = SHAPES["large"], 64

    def cost(slots):
        return sum(cache_memory(shapes, experts, slots, regions))

    best = most_slots(shapes, experts, room, regions)
    assert best == 0 or cost(best) <= room
    assert best == experts - 1 or cost(best + 1) > room


def test_the_line_that_a_real_engine_logged_is_foretold(monkeypatch):
    """The README quotes it: the demo's model, on the host's pages of 4 KiB."""
    line = re.search(
        r"armed: (\d+) of (\d+) experts resident in each.* ([\d.]+) MiB of device memory for slots "
        r"and ([\d.]+) MiB shared, ([\d.]+) MiB of experts on the host",
        (ROOT / "README.md").read_text(),
    )
    slots, experts = map(int, line.groups()[:2])
    tiny = model(
        "qwen3-30b-a3b", num_hidden_layers=4, hidden_size=128, num_experts=experts,
        moe_intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    monkeypatch.setattr(plan_memory, "GRANULARITY", 4096)
    shapes = sizes_of(tiny, tiny.tensors, 1).shapes
    found = (*cache_memory(shapes, experts, slots), host_memory(shapes, experts)[0])
    assert [round(size / MIB, 2) for size in found] == [float(size) for size in line.groups()[2:]]


# --- What does not depend on slots ----------------------------------------------------------


def test_each_pinned_tensor_is_rounded_up_to_a_power_of_two():
    described = model("qwen3-30b-a3b")
    shapes = sizes_of(described, described.tensors, 1).shapes
    # 768 and 384 MiB a layer, as 1024 and 512.
    assert host_memory(shapes, 128) == (48 * (768 + 384) * MIB, 48 * (1024 + 512) * MIB)
    olmoe = model("olmoe-1b-7b")
    exact, pinned = host_memory(sizes_of(olmoe, olmoe.tensors, 1).shapes, 64)
    assert exact == pinned == 12 * 2**30  # 512 and 256 MiB already are


def test_what_is_taken_in_any_case():
    described = model("qwen3-30b-a3b")
    sizes = sizes_of(described, described.tensors, 1)
    fixed = fixed_memory(described, sizes, load(streams=4))
    assert fixed.rest == sizes.rest
    assert fixed.kv_cache == 4 * 8192 * 98304
    # As vllm_compat.memory_at_work, which a worker asks: activations, logits, graphs.
    activations, logits = 2048 * 8 * (3 * 768 + 2048) * 2, 4 * 151936 * 8
    assert fixed.steps == activations + logits + 2**30
    assert fixed.context == layout.CONTEXT
