"""What is read from a config.json, against published and hand-computed numbers."""

import pytest
from model_configs import NAMES, model, values

from expert_cache_shim.commands import CommandError, plan_config
from expert_cache_shim.commands.plan_families import KvLayers, describe

# Parameters as their publishers, or the checkpoints on the Hugging Face hub, give them. Those of a
# draft model (DeepSeek-V3, GLM-4.5) are not counted: vLLM loads them for speculation only.
PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
}
# Known to three digits: "106B", "355B" with its draft model, "80B".
ABOUT = {"glm-4.5-air": 106.85e9, "glm-4.5": 352.8e9, "qwen3-next-80b-a3b": 79.67e9}


def parameters(described) -> int:
    scales = ("scale", "scale_inv", "scales")
    return sum(t.numel * t.count for t in described.tensors if not t.name.endswith(scales))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name):
    assert parameters(model(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", ABOUT)
def test_parameters_are_about_those_published(name):
    assert parameters(model(name)) == pytest.approx(ABOUT[name], rel=1e-3)


@pytest.mark.parametrize(
    "name, total", [("gpt-oss-120b", 116_829_156_672), ("gpt-oss-20b", 20_914_757_184)]
)
def test_two_parameters_of_mxfp4_share_a_byte(name, total):
    described = model(name)
    blocks = sum(t.numel for t in described.tensors if t.name.endswith("_blocks"))
    assert parameters(described) + blocks == total
    assert parameters(model(name, quantization_config=None)) == total


@pytest.mark.parametrize(
    "name, moe_layers",
    [
        ("deepseek-v2-lite", range(1, 27)),
        ("deepseek-v3", range(3, 61)),
        ("glm-4.5", range(3, 92)),
        ("qwen3-30b-a3b", range(48)),
    ],
)
def test_first_layers_may_be_dense(name, moe_layers):
    assert model(name).moe_layers == tuple(moe_layers)


def test_layers_without_experts_by_step_and_by_name():
    described = model("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1, 3])
    assert described.moe_layers == tuple(range(5, 48, 2))


@pytest.mark.parametrize(
    "name, kv",
    [
        ("qwen3-30b-a3b", [KvLayers(48, 2 * 128, 4)]),
        ("mixtral-8x7b", [KvLayers(32, 2 * 128, 8)]),
        ("olmoe-1b-7b", [KvLayers(16, 2 * 128, 16)]),
        ("glm-4.5-air", [KvLayers(46, 2 * 128, 8)]),
        ("deepseek-v2-lite", [KvLayers(27, 512 + 64, 0)]),
        ("deepseek-v3", [KvLayers(61, 512 + 64, 0)]),
        ("gpt-oss-120b", [KvLayers(18, 2 * 64, 8, window=128), KvLayers(18, 2 * 64, 8)]),
        ("qwen3-next-80b-a3b", [KvLayers(12, 2 * 256, 2)]),
    ],
)
def test_what_a_token_leaves_in_the_kv_cache(name, kv):
    assert list(model(name).kv) == kv


def test_a_config_may_leave_out_what_its_family_defaults_to():
    assert model("gpt-oss-20b", layer_types=None).kv == model("gpt-oss-20b").kv
    assert model("mixtral-8x7b", sliding_window=4096).kv[0].window == 4096
    assert model("mixtral-8x7b", num_key_value_heads=None).kv_heads == 32


def test_linear_attention_keeps_a_state():
    # 36 layers: 3 inputs of 2 x 16 x 128 + 32 x 128 channels, and 32 heads of 128 x 128.
    assert model("qwen3-next-80b-a3b").state == 36 * (3 * 8192 + 32 * 128 * 128)


def test_latent_attention_is_folded_once_more():
    # 61 layers of 128 heads: 128 + 128 rows of a latent of 512.
    assert model("deepseek-v3").folded == 61 * 128 * 256 * 512


@pytest.mark.parametrize("name", NAMES)
def test_the_text_part_of_a_larger_model_is_read(name):
    fields = plan_config.Fields({"model_type": "other", "text_config": values(name)}, "config.json")
    assert parameters(describe(fields)) == parameters(model(name))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_type": "llama"}, 'model_type is "llama"; it must be one of deepseek_v2, '),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "2048"}, 'hidden_size is "2048"; it must be a whole number from 1'),
        ({"hidden_size": 2048.5}, "hidden_size is 2048.5; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is true; it must be a whole number"),
        ({"hidden_size": -1}, "hidden_size is -1; it must be a whole number"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000; it must"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be a whole number"),
        ({"num_experts": 1}, "num_experts is 1; it must be a whole number from 2 to 1024"),
        ({"num_experts": 4096}, "num_experts is 4096; it must be a whole number from 2 to 1024"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; it must be a whole number"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ({"mlp_only_layers": ["a"]}, 'mlp_only_layers is "a"; it must be a whole number'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"layer_types": ["a"]}, 'layer_types is ["a"]; it must be a list of num_hidden_layers'),
        ({"layer_types": [None] * 48}, "layer_types is null; it must be a list of texts"),
        ({"torch_dtype": 16}, "torch_dtype is 16; it must be a text"),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8"; it must be an object'),
    ],
)
def test_what_is_wrong_is_named_in_one_line(changes, said):
    with pytest.raises(CommandError) as refusal:
        model("qwen3-30b-a3b", **changes)
    text = str(refusal.value)
    assert text.startswith(f"config.json: {said}") and "\n" not in text
