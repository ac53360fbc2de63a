"""Where features meet: whatever is drawn, the output is bit for bit the uncached one.

Kernels, both storages, policies, preload, expert maps, ids of nobody, repeated ids, layers called
in another order, twice or not at all, steps that raise in the middle, graphs replayed between,
weights that change and sleep: all from one seed.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from synthetic import Model, RoutedExperts, call, load, marlin_methods, methods, routing, worker

from expert_cache_shim import layer as layer_module
from expert_cache_shim import lifecycle, policy
from expert_cache_shim.preload import IDS_PER_EXPERT, Preloader

pytest_plugins = ["synthetic.fixtures"]

METHODS = (
    methods.UnquantizedFusedMoEMethod, methods.Bfloat16MoEMethod, methods.Int8ChannelMoEMethod,
    methods.Fp8BlockMoEMethod, methods.WNA16MoEMethod, marlin_methods.OrderedMoEMethod,
)  # fmt: skip
SEEDS = range(24)
EXECUTIONS = 10


class KernelFailed(Exception):
    pass


class Worker(worker.Worker):
    execute_model = worker.Worker.execute_model  # its own: wrapped here alone

    def reload_weights(self):
        pass

    def update_weights(self):
        pass

    def wake_up(self, tags=None):
        pass


lifecycle.watch(Worker)


class Combination:
    """A model twice, one of them armed, and lots that decide what happens to both."""

    def __init__(self, seed: int, arm, settings) -> None:
        self.lots, self.random = random.Random(seed), torch.Generator().manual_seed(seed)
        lots = self.lots
        self.experts = lots.choice((2, 3, 5, 8, 16))
        settings(
            storage=lots.choice(("virtual", "virtual", "plain")),
            preload=lots.choice(("on", "off")), policy=lots.choice(list(policy.CODES)),
            slots=lots.randint(1, self.experts - 1),
            overflow=lots.choice(("on", "on", "off")), lanes=lots.choice((1, 3)),
            trace=lots.choice(("on", "off")),
        )  # fmt: skip
        of_layer = {"experts": self.experts, "top_k": lots.choice((1, 2, self.experts))}
        if lots.random() < 0.5:
            of_layer["expert_map"] = self._expert_map(ranks=lots.choice((2, 3)))
        kinds = lots.choices(METHODS, k=lots.randint(1, 5))
        if lots.random() < 0.5:  # one kind: only layers of one shape share memory
            kinds = kinds[:1] * len(kinds)
        self.uncached, self.cached = (
            load(Model(*(RoutedExperts(kind, seed=n, **of_layer) for n, kind in enumerate(kinds))))
            for _ in range(2)
        )
        self.report = arm(self.cached)
        assert len(self.report.armed) == len(kinds)
        self.worker = Worker(self.cached)
        self.order = lots.sample(range(len(kinds)), len(kinds))

    def _expert_map(self, ranks: int) -> torch.Tensor:
        ids = self.lots.sample(range(ranks * self.experts), self.experts)
        expert_map = torch.full((ranks * self.experts,), -1, dtype=torch.int32)
        expert_map[torch.tensor(ids)] = torch.arange(self.experts, dtype=torch.int32)
        return expert_map

    def inputs(self, layer: RoutedExperts, tokens: int) -> tuple[torch.Tensor, ...]:
        lots = self.lots
        x, weights, ids = routing(
            layer, tokens, self.random, lots.choice((torch.int32, torch.int64))
        )
        if lots.random() < 0.3:
            ids[:, 0] = ids[:, -1]
        if lots.random() < 0.3:
            ids[:, -1] = lots.choice((-1, layer.global_num_experts, 2**31 - 1))
        if lots.random() < 0.1:
            ids.fill_(-1)
        return x, weights, ids

    def step(self, calls: list[int], tokens: int, failing: int | None) -> None:
        for place, number in enumerate(calls):
            cached, uncached = self.cached.routed[number], self.uncached.routed[number]
            inputs = self.inputs(cached, tokens)
            if place == failing:
                self.fail(number, inputs)
            assert torch.equal(call(cached, *inputs), call(uncached, *inputs)), number

    def fail(self, number: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """The kernel raises, after the cache has done its part."""

        def apply(**kwargs):
            raise KernelFailed

        views = self.report.armed[number]._views.values()
        kept = [(view, view.apply) for view in views]
        for view in views:
            view.apply = apply
        try:
            call(self.cached.routed[number], *inputs)
        finally:
            for view, original in kept:
                view.apply = original
        raise KernelFailed  # of a step that read through

    def execute(self) -> None:
        lots, order = self.lots, self.order
        orders = (sorted(order), order, lots.choices(order, k=len(order)), [*order, *order])
        calls = lots.choice(orders)
        known = self.cached.routed[0].global_num_experts
        wide = IDS_PER_EXPERT * known // self.cached.routed[0].top_k + 1
        failing = lots.randrange(len(calls)) if lots.random() < 0.15 else None
        try:
            tokens = lots.choice((1, 1, 2, 3, wide, wide))
            self.worker.execute_model(partial(self.step, calls, tokens, failing))
        except KernelFailed:
            assert failing is not None

    def between(self) -> None:
        """What happens between two executions."""
        lots = self.lots
        what = lots.choice((self.replay, self.change, self.sleep, None, None))
        if what is not None:
            what()

    def replay(self) -> None:
        """As a captured graph does it, without any Python of ours."""
        for number in self.order:
            cache = self.report.armed[number].cache
            ids = self.inputs(self.cached.routed[number], 3)[2]
            if cache.mode(ids) != layer_module.SKIP:
                cache.run(ids, cache.mode(ids))

    def change(self) -> None:
        """One expert of one layer gets other weights, in place."""
        number, expert = self.lots.choice(self.order), self.lots.randrange(self.experts)
        for model in (self.cached, self.uncached):
            layer = model.routed[number]
            weight = layer.w2_weight.data[expert]
            weight.copy_(weight.roll(1, 0))
        own = self.worker
        tell = (own.reload_weights, own.update_weights, own.wake_up)
        self.lots.choice((*tell, lifecycle.weights_changed))()

    def sleep(self) -> None:
        """Of level 2: what PyTorch allocated is there again, without its content."""
        worker.wipe(self.report)
        self.worker.wake_up()


def serve(seed: int, arm, settings) -> Combination:
    combination = Combination(seed, arm, settings)
    for _ in range(EXECUTIONS):
        combination.execute()
        combination.between()
    return combination


@pytest.mark.parametrize("seed", SEEDS)
def test_the_output_is_the_uncached_one(arm, settings, seed):
    combination = serve(seed, arm, settings)
    assert all(armed.installed for armed in combination.report.armed)
    assert combination.report.steps() > 0


@pytest.mark.parametrize("left_out", ["what changed is forgotten", "whose rows were filled"])
def test_control_a_part_that_is_left_out_shows(arm, settings, monkeypatch, left_out):
    if left_out == "what changed is forgotten":
        for name in ("forget", "restore"):
            monkeypatch.setattr(layer_module.ExpertCache, name, lambda cache: None)
    else:
        monkeypatch.setattr(Preloader, "finish", lambda preloader, cache: True)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            serve(seed, arm, settings)
