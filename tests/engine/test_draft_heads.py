"""Drafts by a head that reads the model's hidden states: EAGLE, EAGLE-3, and MTP.

vLLM verifies all drafted tokens of a request in one step, which then routes to more experts. The
heads of EAGLE are dense. An MTP block has experts, which the cache leaves to vLLM.
"""

from dataclasses import replace

import pytest
from draft_checkpoints import write_draft_checkpoint
from engine import IN_PROCESS, Job, run, shim, snapshots_of

SLOTS = 16
# By draft: the model whose tokens are drafted, and the method.
DRAFTS = {
    "eagle": ("qwen3_moe", "eagle"),
    "eagle3": ("qwen3_moe", "eagle3"),
    "glm4_moe": ("glm4_moe", "mtp"),
    "deepseek_v3": ("deepseek_v3", "mtp"),
}
MTP = [draft for draft, (_, method) in DRAFTS.items() if method == "mtp"]


@pytest.fixture(scope="module")
def models(folder, checkpoint):
    """The folder of each model and draft."""
    drafts = {name: write_draft_checkpoint(name, folder / "drafts" / name) for name in DRAFTS}
    return {"qwen3_moe": checkpoint("qwen3_moe"), **{k: str(v) for k, v in drafts.items()}}


@pytest.fixture(scope="module")
def jobs(models):
    def job(draft: str) -> Job:
        model, method = DRAFTS[draft]
        config = {"method": method, "num_speculative_tokens": 3}
        if method != "mtp":
            config["model"] = models[draft]
        engine = {"dtype": "float32", "disable_log_stats": False, "speculative_config": config}
        return Job(models[model], engine, scenario=("drafted",))

    return {draft: job(draft) for draft in DRAFTS}


@pytest.fixture(scope="module")
def off(folder, environment, jobs):
    """By draft; and by model what transformers answers."""
    todo = {**jobs, "transformers": Job(jobs["glm4_moe"].model, reference=True)}
    answers = run(list(todo.values()), folder / "heads", environment(**IN_PROCESS))
    return dict(zip(todo, answers))


@pytest.fixture(scope="module")
def on(folder, environment, jobs):
    wrong = replace(
        jobs["glm4_moe"], environment={"EXPERT_CACHE_SNAPSHOT": "off"}, plugins=("wrong_expert",)
    )
    todo = {**jobs, "wrong expert": wrong}
    settings = shim(folder / "heads-snapshots", slots=SLOTS)
    variables = environment(**IN_PROCESS, **settings)
    answers = run(list(todo.values()), folder / "heads-cached", variables)
    return dict(zip(todo, answers))


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_tokens_do_not_change(draft, on, off):
    assert on[draft]["tokens"] == off[draft]["tokens"]
    assert on[draft]["again"] == off[draft]["again"]
    assert on[draft]["drafted"] == off[draft]["drafted"] > 0


def test_they_are_those_of_transformers(on, off, stock):
    assert on["eagle"]["tokens"] == stock["transformers"]["tokens"]
    assert on["eagle3"]["tokens"] == stock["transformers"]["tokens"]
    assert on["glm4_moe"]["tokens"] == off["transformers"]["tokens"]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_model_is_served_through_the_cache(draft, on, jobs, folder):
    assert on[draft]["tokens"]
    for snapshot in snapshots_of(folder / "heads-snapshots", jobs[draft].model):
        assert len(snapshot.layers) == (3 if draft in MTP else 4)
        assert not any("mtp" in layer["name"] for layer in snapshot.layers)
        for counter in ("steps", "hits", "misses", "overflow"):
            assert (snapshot.by_layer(counter) > 0).all(), counter


@pytest.mark.parametrize("draft", MTP)
def test_the_experts_of_a_prediction_block_are_refused(draft, on):
    (refused,) = [line for line in on[draft].cache_lines() if "not armed" in line]
    assert "1 of 1 MoE layers" in refused and "mtp_block" in refused
    assert "a draft model's experts are few and resident" in refused


def test_wrong_experts_would_change_the_tokens(on, off):
    changed = zip(on["wrong expert"]["tokens"], off["glm4_moe"]["tokens"])
    assert all(tokens != right for tokens, right in changed)
