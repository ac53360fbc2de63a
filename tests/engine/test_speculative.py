"""Steps that are wider than a token a request: drafted tokens, and prompts in parts.

Speculative decoding verifies k + 1 tokens of a request at once, so that a step routes to more
experts. Drafts come from the prompt itself (n-grams), or from a model, whose experts are not
armed. Prompts come in chunks, and a second time out of the prefix cache.
"""

from dataclasses import replace

import pytest
from engine import IN_PROCESS, PROMPTS, Job, run, shim, snapshots_of

SLOTS = 16
# Prompts that repeat themselves, which n-grams can be drafted from.
REPEATING = ("abcabcabcabcabcabcabc " * 6, "1 2 3 1 2 3 1 2 3 1 2 3 " * 8)
DRAFTED = 3
# In this order: after n-grams vLLM 0.32 starts no other engine with drafts in the same process.
KINDS = ("chunked", "draft", "ngram")


@pytest.fixture(scope="module")
def jobs(checkpoint) -> dict[str, Job]:
    model, draft = checkpoint("qwen3_moe"), checkpoint("mixtral")
    speculative = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft": {"method": "draft_model", "model": draft},
    }
    engines = {
        "chunked": {"max_num_batched_tokens": 32, "enable_chunked_prefill": True},
        **{
            kind: {"speculative_config": {**config, "num_speculative_tokens": DRAFTED}}
            for kind, config in speculative.items()
        },
    }
    return {
        kind: Job(
            model,
            {"disable_log_stats": False, "enable_prefix_caching": True, **engines[kind]},
            scenario=("drafted",),
            prompts=(*PROMPTS[:4], *REPEATING),
            max_tokens=(8, 10, 12, 16, 24, 32),
        )
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def off(folder, environment, jobs):
    answers = run(list(jobs.values()), folder / "speculative", environment(**IN_PROCESS))
    return dict(zip(KINDS, answers))


@pytest.fixture(scope="module")
def on(folder, environment, jobs):
    """The answer, and the snapshots of that run, by kind."""
    settings = shim(folder / "speculative-snapshots", slots=SLOTS)
    variables = environment(**IN_PROCESS, **settings)
    answers = run(list(jobs.values()), folder / "speculative-cached", variables)
    return dict(zip(KINDS, answers))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_do_not_change(kind, on, off):
    assert on[kind]["tokens"] == off[kind]["tokens"]
    assert on[kind]["again"] == off[kind]["again"]


def test_every_kind_goes_through_the_cache(on, folder, jobs):
    snapshots = snapshots_of(folder / "speculative-snapshots", jobs["ngram"].model)
    assert len(snapshots) == len(KINDS)
    for snapshot in snapshots:
        assert len(snapshot.layers) == 4
        for counter in ("steps", "hits", "misses", "overflow", "evictions"):
            assert snapshot.total(counter) > 0, counter
        assert snapshot.total("read_through") == 0


def test_drafts_are_verified_and_some_are_accepted(on, off):
    assert on["ngram"]["drafted"] == off["ngram"]["drafted"] > 0
    assert on["ngram"]["accepted"] == off["ngram"]["accepted"] > 0
    assert on["draft"]["drafted"] == off["draft"]["drafted"] > 0


def test_the_prefix_cache_is_hit(on):
    assert all(on[kind]["prefix_hits"] > 0 for kind in KINDS)


def test_a_model_that_was_served_before_is_let_go_with_its_cache(on, off):
    assert [on[kind]["models"] for kind in KINDS] == [1, 1, 1]
    assert [off[kind]["models"] for kind in KINDS] == [0, 0, 0]


def test_the_draft_model_is_refused_and_the_model_is_armed(on, checkpoint):
    armed, refused = [line for line in on["draft"].cache_lines() if " armed" in line]
    assert f"of {checkpoint('qwen3_moe')} armed" in armed
    assert f"of {checkpoint('mixtral')} not armed" in refused
    assert "a draft model's experts are few and resident" in refused


def test_wrong_experts_would_change_the_tokens(folder, environment, jobs, off):
    job = replace(jobs["ngram"], plugins=("wrong_expert",), scenario=())
    settings = shim(folder / "speculative-wrong-snapshots", slots=SLOTS)
    variables = environment(**IN_PROCESS, **settings)
    (answer,) = run([job], folder / "speculative-wrong", variables)
    changed = zip(answer["tokens"], off["ngram"]["tokens"])
    assert all(tokens != right for tokens, right in changed)
