"""With LoRA no layer is armed, and requests are served with the adapter as vLLM would."""

import pytest
from adapter import write_adapter
from engine import IN_PROCESS, Job, run, shim, snapshots_of


@pytest.fixture(scope="module")
def answers(folder, checkpoint, environment):
    """Without the cache and with it."""
    adapter = str(write_adapter(folder / "adapter"))
    engine = {"enable_lora": True, "max_lora_rank": 8}
    scenario = ("adapter", adapter)
    job = Job(checkpoint("qwen3_moe"), engine, plugins=("lora_experts",), scenario=scenario)
    settings = shim(folder / "lora-snapshots", slots=16)
    return [
        run([job], folder / name, environment(**IN_PROCESS, **variables))[0]
        for name, variables in (
            ("stock-lora", {"PYTHONPATH": settings["PYTHONPATH"]}),
            ("lora", settings),
        )
    ]


def test_the_tokens_are_those_of_vllm_with_an_adapter_and_without(answers):
    off, on = answers
    assert on["tokens"] == off["tokens"]
    assert on["adapted"] == off["adapted"]
    short = [tokens[:6] for tokens in on["tokens"]]
    assert all(one[:6] != other for one, other in zip(on["adapted"], short))


def test_the_layers_are_refused(answers, folder, checkpoint):
    (line,) = answers[1].cache_lines()
    assert "4 of 4 MoE layers" in line and "not armed" in line
    assert "LoRA kernels index by expert id; serve without --enable-lora" in line
    assert snapshots_of(folder / "lora-snapshots", checkpoint("qwen3_moe")) == []
