"""Real vLLM on a GPU. Each test starts engines, a minute or more each.

What vLLM needs on this machine is said in BENCH_ENGINE, for example
`attention_backend=TRITON_ATTN`, and in vLLM's own environment variables.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import served

from bench import arms, jobs, options, schemes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def vllm_installed(library) -> None:
    served.needs_vllm()


def test_tokens_are_those_of_the_resident_model_and_wrong_experts_show():
    """Resident, offloaded, 64, 32 and 16 slots of 128, under captured graphs, and the control."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.tokens"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_plain_layer_gives_the_same_tokens():
    done = subprocess.run(
        [sys.executable, "-m", "bench.tokens", "--arms", "resident", "cache-32-plain",
         "--control", "cache-32-plain"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_quantised_experts_give_the_same_tokens(tmp_path):
    """Every scheme that vLLM has a kernel for on this GPU; bfloat16 and float16 have one on all."""
    output = tmp_path / "schemes.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.schemes", "--plain", "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        scheme["name"]: schemes.judge(scheme)
        for scheme in json.loads(output.read_text())["schemes"]
    }
    assert found["bf16"] == found["fp16"] == ("served, identical", True)


FULL_BATCH = {"name": "full", "kind": "full_batch", "streams": 4, "length": 8704}
AFTER_PREFILL = {"name": "after", "kind": "after_prefill", "tokens": 8000, "warm": 96, "steps": 64}


def on_a_small_gpu(arm: str, *tasks: dict) -> dict[str, dict]:
    """What each task found, 8 layers on a GPU held to 8 GiB."""
    common = options.Options(layers=8, memory_gib=8.0, engine={
        **options.ENGINE, **options.capture([1, 4]), **options.engine_options([]),
        "max_num_seqs": 4,
    })  # fmt: skip
    events = list(jobs.run(arms.parse(arm), list(tasks), common))
    errors = [event for event in events if event["event"] == "error"]
    assert not errors, "\n".join([errors[0]["text"], *errors[0]["log"]])
    return {event["name"]: event for event in events if event["event"] == "task"}


@pytest.fixture(scope="module")
def uncached_peak() -> float:
    """GiB of device memory that vLLM takes by itself: 0.25.1 goes a little beyond its limit."""
    return on_a_small_gpu("uncached", FULL_BATCH)["full"]["peak_gib"]


@pytest.mark.parametrize("arm", ["cache-16", "cache-auto", "cache-16-plain"])
def test_a_full_batch_at_full_context_takes_no_more_memory_than_vllm_does(arm, uncached_peak):
    """And the prompts of that batch leave the decode working set as it was."""
    found = on_a_small_gpu(arm, FULL_BATCH, AFTER_PREFILL)
    assert found["full"]["finished"] == 4
    assert found["full"]["peak_gib"] <= uncached_peak + 1 / 64
    misses = found["after"]["misses"]
    assert misses["without"] > 0
    assert misses["with"] <= 1.1 * misses["without"]
