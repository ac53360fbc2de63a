"""Five architectures through the cache, with both kinds of storage: the tokens do not change.

Each architecture has a replacement policy of its own, so that all five policies are run.
"""

import pytest
from engine import IN_PROCESS, MAX_TOKENS, MODELS, PROMPTS, Job, run, shim, snapshots_of, total

POLICIES = dict(zip(MODELS, ("lrfu", "lru", "lfu", "fifo", "slru")))
EXPERTS, TOP_K = 32, 4
HALF, QUARTER = EXPERTS // 2, EXPERTS // 4
# A byte is a token, and the last token of an answer is never fed back.
TOKENS = sum(map(len, PROMPTS)) + sum(MAX_TOKENS) - len(MAX_TOKENS)


WAYS = [(storage, slots) for storage in ("virtual", "plain") for slots in (HALF, QUARTER)]


@pytest.fixture(scope="module")
def cached(folder, checkpoint, environment):
    """Every model in every way to cache it, all in one process: the answer, and the snapshots
    of that run, by (storage, slots, kind)."""
    jobs, snapshots = {}, {}
    for way in WAYS:
        for kind in MODELS:
            where = folder / "cached-snapshots" / f"{way[0]}-{way[1]}"
            settings = shim(where, storage=way[0], slots=way[1], policy=POLICIES[kind])
            variables = {name: str(value) for name, value in settings.items()}
            key = (*way, kind)
            jobs[key] = Job(checkpoint(kind), environment=variables)
            snapshots[key] = where
    answers = run(list(jobs.values()), folder / "cached", environment(**IN_PROCESS, **shim(folder)))
    return {
        key: (answer, snapshots_of(snapshots[key], jobs[key].model))
        for key, answer in zip(jobs, answers)
    }


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("storage, slots", WAYS)
def test_the_cache_works_and_the_tokens_do_not_change(storage, slots, kind, cached, stock):
    answer, snapshots = cached[storage, slots, kind]
    assert answer["tokens"] == stock[kind]["tokens"]

    (snapshot,) = snapshots
    assert len(snapshot.layers) == (3 if kind == "deepseek_v2" else 4)
    assert {(layer["storage"], layer["slots"]) for layer in snapshot.layers} == {(storage, slots)}
    for counter in ("steps", "hits", "misses", "overflow", "evictions"):
        assert snapshot.total(counter) > 0, counter
    assert snapshot.total("read_through") == 0
    # Every token of the eight answers went through every layer's cache, and no dummy did.
    assert snapshot.total("ids") == TOKENS * TOP_K * len(snapshot.layers)


@pytest.mark.parametrize("storage", ("virtual", "plain"))
def test_fewer_slots_fetch_more(storage, cached):
    half, quarter = (
        total(cached[storage, slots, "qwen3_moe"][1], "misses") for slots in (HALF, QUARTER)
    )
    assert quarter > half


def test_both_storages_keep_the_same_cache(cached):
    """What is resident depends on the routing alone, so the counters agree to the last miss."""
    (virtual,), (plain,) = (
        cached[storage, QUARTER, "qwen3_moe"][1] for storage in ("virtual", "plain")
    )
    assert virtual.counters.tolist() == plain.counters.tolist()


@pytest.fixture(scope="module")
def checked(folder, checkpoint, environment):
    """Qwen3-MoE through the cache: without overflow rows, in float32, and with a fault that
    fetches wrong experts, which stays in its process and so comes last."""
    model, snapshots = checkpoint("qwen3_moe"), folder / "checked-snapshots"
    no_overflow = {
        "EXPERT_CACHE_OVERFLOW": "off",
        "EXPERT_CACHE_SNAPSHOT": str(snapshots / "no overflow"),
    }
    jobs = {
        "no overflow": Job(model, environment=no_overflow),
        "float32": Job(model, {"dtype": "float32"}),
        "wrong expert": Job(model, plugins=("wrong_expert",)),
    }
    settings = shim(snapshots, slots=HALF)
    answers = run(list(jobs.values()), folder / "checked", environment(**IN_PROCESS, **settings))
    return dict(zip(jobs, answers))


def test_without_overflow_rows_wide_steps_are_read_through(checked, stock, folder, checkpoint):
    assert checked["no overflow"]["tokens"] == stock["qwen3_moe"]["tokens"]
    where = folder / "checked-snapshots" / "no overflow"
    (snapshot,) = snapshots_of(where, checkpoint("qwen3_moe"))
    assert all(snapshot.total(counter) > 0 for counter in ("steps", "hits", "misses"))
    assert snapshot.total("read_through") > 0
    assert snapshot.total("overflow") == 0


def test_tokens_in_float32_are_those_of_transformers(checked, stock):
    assert stock["float32"]["tokens"] == stock["transformers"]["tokens"]
    assert checked["float32"]["tokens"] == stock["transformers"]["tokens"]


def test_wrong_experts_would_change_the_tokens(checked, stock):
    changed = zip(checked["wrong expert"]["tokens"], stock["qwen3_moe"]["tokens"])
    assert all(tokens != right for tokens, right in changed)
