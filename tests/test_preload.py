"""Fetching the next layer's experts ahead: equal output, and that it happens only when it may."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from synthetic import Model, RoutedExperts, call, load, methods, routing
from synthetic.worker import Worker

from expert_cache_shim import layer as layer_module
from expert_cache_shim import lifecycle
from expert_cache_shim.native import KernelError
from expert_cache_shim.preload import IDS_PER_EXPERT

pytest_plugins = ["synthetic.fixtures"]

E, SLOTS, LAYERS = 8, 3, 4
WIDE = IDS_PER_EXPERT * E // 2  # tokens of two experts each


@pytest.fixture
def preloads(monkeypatch):
    """The caches that were preloaded, in order."""
    called = []
    original = layer_module.ExpertCache.preload

    def preload(cache, stream):
        called.append(cache)
        original(cache, stream)

    monkeypatch.setattr(layer_module.ExpertCache, "preload", preload)
    return called


@pytest.fixture
def kept():
    """The armed models: a report lives as long as its model."""
    return []


@pytest.fixture
def models(arm, settings, kept):
    """Two equal models, and the caches of the second one's layers."""

    def make(preload="on", slots=SLOTS, **options):
        settings(preload=preload, slots=slots, storage="virtual")
        uncached, cached = (
            load(
                Model(
                    *(
                        RoutedExperts(methods.Int8ChannelMoEMethod, seed=n, **options)
                        for n in range(LAYERS)
                    )
                )
            )
            for _ in range(2)
        )
        kept.append(cached)
        report = arm(cached)
        assert [str(refusal) for _, refusal in report.refused] == []
        return uncached.routed, cached.routed, report.armed

    return make


def inputs_of(layers, tokens_of_steps):
    random = torch.Generator().manual_seed(5)
    return [routing(layers[0], tokens, random) for tokens in tokens_of_steps]


def assert_equal_pass(uncached, cached, inputs, but=()):
    for number, (one, other) in enumerate(zip(uncached, cached, strict=True)):
        if number not in but:
            assert torch.equal(call(other, *inputs), call(one, *inputs)), number


def test_wide_steps_fetch_ahead_and_the_output_is_the_same(models, preloads):
    uncached, cached, armed = models()
    for inputs in inputs_of(uncached, [1, WIDE, 2, WIDE, WIDE + 50, 1]):
        assert_equal_pass(uncached, cached, inputs)
    after_the_first = [layer.cache for layer in armed[1:]]
    assert preloads == 3 * after_the_first


def test_expert_parallel_ranks_fetch_ahead_what_is_theirs(models, preloads):
    expert_map = torch.full((2 * E,), -1, dtype=torch.int32)
    expert_map[1::2] = torch.arange(E, dtype=torch.int32)
    uncached, cached, armed = models(expert_map=expert_map)
    for inputs in inputs_of(uncached, [1, WIDE, 2 * WIDE, 3, 2 * WIDE]):
        assert_equal_pass(uncached, cached, inputs)
    # Half as many ids a rank: a step must be twice as wide to name nearly all of its experts.
    assert preloads == 2 * [layer.cache for layer in armed[1:]]


def test_a_preloaded_step_copies_nothing_from_the_host(models):
    uncached, cached, armed = models()
    for inputs in inputs_of(uncached, [WIDE, WIDE]):
        assert_equal_pass(uncached, cached, inputs)
    for number, layer in enumerate(armed):
        count = int(layer.cache.state[1])
        copies = layer.cache.state[-4 * E :].view(E, 4)[:count]
        from_host = (copies[:, 1] < 0) & (copies[:, 2] >= 0)
        assert int(from_host.sum()) == (0 if number else E - SLOTS)


def test_control_the_rows_that_were_preloaded_are_the_rows_that_are_read(models, monkeypatch):
    uncached, cached, _ = models()
    warm, inputs = inputs_of(uncached, [WIDE, WIDE])
    assert_equal_pass(uncached, cached, warm)
    original = layer_module.ExpertCache.preload

    def preload(cache, stream):
        original(cache, stream)
        for placement in cache.storage.placements:
            placement.slots[SLOTS:].zero_()

    monkeypatch.setattr(layer_module.ExpertCache, "preload", preload)
    assert torch.equal(call(cached[0], *inputs), call(uncached[0], *inputs))
    assert not torch.equal(call(cached[1], *inputs), call(uncached[1], *inputs))


def test_a_layer_that_is_passed_over_does_not_disturb_the_others(models, preloads):
    uncached, cached, _ = models()
    steps = inputs_of(uncached, [WIDE, WIDE, WIDE, 1, WIDE])
    for number, inputs in enumerate(steps):
        assert_equal_pass(uncached, cached, inputs, but=(number % LAYERS,))
    assert preloads


def test_a_model_that_stops_half_way_may_start_again(models):
    uncached, cached, _ = models()
    for inputs in inputs_of(uncached, [WIDE, WIDE, 2, WIDE]):
        assert_equal_pass(uncached, cached, inputs, but=(2, 3))
        assert_equal_pass(uncached, cached, inputs)


@pytest.mark.parametrize("said", [True, False])
def test_weights_that_change_between_a_preload_and_its_use(models, preloads, kept, said):
    """Of one expert, in place; it shows where nobody says so."""
    uncached, cached, armed = models()
    warm, wide = inputs_of(uncached, [WIDE, WIDE])
    assert_equal_pass(uncached, cached, warm)
    preloads.clear()
    assert torch.equal(call(cached[0], *wide), call(uncached[0], *wide))
    assert preloads == [armed[1].cache]
    for layer in (uncached[1], cached[1]):
        layer.w13_weight.data[4].neg_()
    if said:
        lifecycle.weights_changed()
    assert torch.equal(call(cached[1], *wide), call(uncached[1], *wide)) == said


def replay(armed, inputs):
    """What a captured graph does to the layers: no Python of ours runs."""
    for layer in armed:
        layer.cache.run(inputs[2], layer_module.ROWS)


def differing_after_replays(models, kept, worker) -> int:
    """Executions of which some layer's output differs: eager ones of a model whose second layer
    runs first, so that it is fetched for at the end, and replays between."""
    uncached, cached, armed = models()
    order = [1, 2, 3, 0]
    worker, differing = worker(kept[-1]), []

    def step(inputs):
        outs = [(call(cached[n], *inputs), call(uncached[n], *inputs)) for n in order]
        differing.append(not all(torch.equal(one, other) for one, other in outs))

    for wide, narrow in zip(inputs_of(uncached, [WIDE] * 6), inputs_of(uncached, [4] * 6)):
        worker.execute_model(partial(step, wide))
        replay([armed[n] for n in order], narrow)
    return sum(differing)


def watched_worker() -> type:
    worker = type("Worker", (Worker,), {"execute_model": Worker.execute_model})
    lifecycle.watch(worker)
    return worker


def test_nothing_is_under_way_when_an_execution_ends(models, kept, preloads):
    assert differing_after_replays(models, kept, watched_worker()) == 0
    assert preloads


def test_control_what_is_left_under_way_is_overtaken_by_a_graph(models, kept):
    assert differing_after_replays(models, kept, Worker) > 0


def test_nothing_is_under_way_after_an_execution_that_fails(models, kept, monkeypatch):
    _, cached, armed = models()
    worker = watched_worker()(kept[-1])

    def step():
        for layer in cached:
            call(layer, *wide)

    (wide,) = inputs_of(cached, [WIDE])
    worker.execute_model(step)
    view = armed[1]._views[layer_module.ROWS]
    monkeypatch.setattr(view, "apply", lambda **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        worker.execute_model(step)
    assert not armed[2].preloader.finish(armed[2].cache)


def test_narrow_steps_fetch_nothing_ahead(models, preloads):
    uncached, cached, _ = models()
    for inputs in inputs_of(uncached, [1, 40, WIDE - 1]):
        assert_equal_pass(uncached, cached, inputs)
    assert not preloads


@pytest.mark.parametrize("preload", ["off", "auto"])
def test_off_and_the_default_on_a_cpu_fetch_nothing_ahead(models, preloads, preload):
    uncached, cached, armed = models(preload)
    assert_equal_pass(uncached, cached, inputs_of(uncached, [WIDE])[0])
    assert not preloads
    assert sum(bool(layer.cache.storage.shared) for layer in armed) == 1


@pytest.mark.parametrize("preload", ["on", "off"])
def test_the_line_at_load_says_so(models, caplog, preload):
    with caplog.at_level("INFO", logger="vllm.expert_cache"):
        models(preload)
    assert ("virtual storage with preload" in caplog.text) == (preload == "on")


def test_it_takes_overflow_rows_twice(models):
    _, _, armed = models()
    shared = [layer.cache.storage.shared for layer in armed]
    assert shared[0] == shared[1] > 0
    assert shared[2:] == [0, 0]


def test_a_layer_given_back_is_not_fetched_for(models, preloads):
    uncached, cached, armed = models()
    armed[2].remove()
    for inputs in inputs_of(uncached, [WIDE, WIDE]):
        assert_equal_pass(uncached, cached, inputs)
    assert armed[2].cache not in preloads
    assert armed[3].cache not in preloads
    assert armed[1].cache in preloads


def test_a_launch_that_fails_ends_it_and_serving_goes_on(models, monkeypatch, caplog):
    uncached, cached, armed = models()

    def fail(*args):
        raise KernelError("expert_cache_preload", 1, "no such thing")

    monkeypatch.setattr(type(armed[0].cache.library), "preload", fail)
    for inputs in inputs_of(uncached, [WIDE, WIDE]):
        assert_equal_pass(uncached, cached, inputs)
    messages = [r.getMessage() for r in caplog.records if "no longer fetched ahead" in r.message]
    assert len(messages) == 1
    assert all(layer.installed for layer in armed)
