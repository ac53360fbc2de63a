"""Long prompts, for which the next layer's experts are fetched ahead."""

from engine import IN_PROCESS, Job, run, shim, snapshots_of, total

LONG = " ".join(f"{word} {number}" for number in range(80) for word in ("expert", "token"))
PROMPTS = (LONG, "hello world", LONG[::-1])
MAX_TOKENS = (8, 24, 8)


def test_tokens_are_those_of_vllm_alone(folder, checkpoint, environment):
    """On a CPU nothing runs at the same time: what is fetched, and where it lies, is the same."""
    model = checkpoint("qwen3_moe")
    engine = {"max_model_len": 2048, "max_num_batched_tokens": 4096}
    jobs = [
        Job(model, engine, settings, ("preload_counter",), prompts=PROMPTS, max_tokens=MAX_TOKENS)
        for settings in ({"EXPERT_CACHE_DISABLE": "1"}, {"EXPERT_CACHE_DISABLE": ""})
    ]
    variables = environment(
        **IN_PROCESS, **shim(folder / "preload-snapshots", slots=8, preload="on")
    )
    stock, cached = run(jobs, folder / "preload", variables)

    assert cached["tokens"] == stock["tokens"]
    # One step has both long prompts; three of the four layers have one before them.
    assert cached.log.count("fetched ahead") >= 3
    assert "virtual storage with preload" in cached.log
    assert "fetched ahead" not in stock.log
    snapshots = snapshots_of(folder / "preload-snapshots", model)
    assert total(snapshots, "hits") and total(snapshots, "overflow")
