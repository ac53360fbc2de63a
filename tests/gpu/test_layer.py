"""A layer's cache on a GPU, inside CUDA graphs: what its kernel would read is always right."""

from itertools import islice

import numpy as np
import pytest
import routing
import torch

from bench.device_layer import Difference
from bench.timing import captured
from expert_cache_shim.discovery import ExpertTensors
from expert_cache_shim.layer import ROWS, SCRATCH, ExpertCache
from expert_cache_shim.policy import COUNTERS, Reference
from expert_cache_shim.preload import IDS_PER_EXPERT, Preloader
from expert_cache_shim.settings import Settings
from expert_cache_shim.storage import Allocator

EXPERTS, SLOTS, TOP_K = 64, 16, 8


class CachedLayer:
    """An ExpertCache over pinned tensors: two large ones, a scale of 2 bytes, an odd bias."""

    def __init__(
        self, library, device, kind: str, policy: str = "lrfu",
        allocator: Allocator | None = None, region: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        self.tensors = ExpertTensors(EXPERTS)
        for shape in ((96, 1024), (1024, 48), (1,), (37,)):
            values = torch.randn(EXPERTS, *shape, generator=generator).to(torch.bfloat16)
            self.tensors.add(values.pin_memory(), name=f"w13_{shape}")
        allocator = allocator or Allocator(library, device)
        if kind == "virtual":
            storage = allocator.virtual(self.tensors, SLOTS, region)
        else:
            storage = allocator.plain(self.tensors, SLOTS, scratch=True)
        self.cache = ExpertCache(library, storage, EXPERTS, SLOTS, Settings(policy=policy))
        self.device = device
        self.reference = Reference(EXPERTS, SLOTS, policy)
        self._graphs: dict[int, tuple] = {}

    def step(self, ids: np.ndarray) -> None:
        """One layer-step by replaying the graph of its number of tokens, checked."""
        tokens = len(ids)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._capture(tokens)
        buffer, rows, replay, mode = self._graphs[tokens]
        buffer.copy_(torch.from_numpy(ids))
        replay()
        expected = self.reference.step(ids, {ROWS: "rows", SCRATCH: "scratch"}[mode])
        if not np.array_equal(rows[0].cpu().numpy(), expected):
            raise Difference(f"step {self.reference.step_number}: row ids differ")
        counters = dict(zip(COUNTERS, self.cache.counters.tolist()))
        if counters != self.reference.counters:
            raise Difference(f"counters are {counters}, not {self.reference.counters}")
        self._check_records(ids, rows[0].cpu().numpy(), mode)

    def _capture(self, tokens: int) -> tuple:
        buffer = torch.zeros(tokens, TOP_K, dtype=torch.int32, device=self.device)
        mode, rows = self.cache.mode(buffer), []
        state, counters = self.cache.state.clone(), self.cache.counters.clone()

        def run() -> None:
            rows[:] = [self.cache.run(buffer, mode)]

        replay = captured(run)
        # The run that warmed up is not a step of the test.
        self.cache.state.copy_(state)
        self.cache.counters.copy_(counters)
        return buffer, rows, replay, mode

    def _check_records(self, ids: np.ndarray, rows: np.ndarray, mode: int) -> None:
        """What the kernel reads at each row is what the host has for the expert."""
        experts, where = torch.from_numpy(ids.ravel()), torch.from_numpy(rows.ravel())
        for placement in self.cache.storage.placements:
            device_rows = placement.scratch if mode == SCRATCH else placement.slots
            found = device_rows[where.to(self.device).long()].cpu()
            if not torch.equal(found, placement.source.tensor[experts.long()]):
                raise Difference(f"{placement.source.label}: a row holds the wrong record")


@pytest.fixture(params=["virtual", "plain"])
def layer(request, library, device) -> CachedLayer:
    return CachedLayer(library, device, request.param)


def steps(seed: int, widths: list[int]) -> list[np.ndarray]:
    """Skewed routing, int32 `[tokens, TOP_K]`, of the given numbers of tokens."""
    generator = np.random.default_rng(seed)
    token = (ids[0] for ids in routing.skewed(generator, EXPERTS))
    return [np.stack(list(islice(token, width))).astype(np.int32) for width in widths]


def test_slots_are_kept_from_replay_to_replay(layer):
    for ids in steps(1, [1] * 60):
        layer.step(ids)
    counters = layer.reference.counters
    assert counters["hits"] > counters["misses"] > 0
    assert counters["evictions"] > 0


def test_graphs_of_several_widths_share_one_cache(layer):
    for ids in steps(2, [1, 2, 1, 16, 1, 200, 2, 1, 16, 16, 1, 1] * 3):
        layer.step(ids)
    assert layer.reference.counters["overflow"] > 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru"])
def test_other_policies(library, device, policy):
    layer = CachedLayer(library, device, "virtual", policy)
    for ids in steps(3, [1, 1, 16, 1] * 10):
        layer.step(ids)


def test_an_interleaved_layer_does_not_harm_slots(library, device):
    """Two layers write the overflow rows in turn, as the layers of a model do."""
    allocator = Allocator(library, device)
    layers = [CachedLayer(library, device, "virtual", allocator=allocator) for _ in range(2)]
    for first, second in zip(steps(4, [1, 32] * 10), steps(5, [32, 1] * 10)):
        layers[0].step(first)
        layers[1].step(second)


def a_pass(layers: list[CachedLayer], preloader: Preloader, ids: np.ndarray, ahead: bool) -> None:
    """One step of all layers in turn, nothing waited for until the end, then checked."""
    on_device = torch.from_numpy(ids).to(layers[0].device)
    work = torch.randn(2048, 2048, device=layers[0].device)
    experts, places = (torch.from_numpy(a) for a in np.unique(ids.ravel(), return_index=True))
    places = places.to(on_device.device)
    read = []
    for layer, following in zip(layers, [*layers[1:], None]):
        rows = layer.cache.run(on_device, ROWS, preloader.finish(layer.cache))
        if following is not None and ahead:
            preloader.start(following.cache, on_device)
        work = torch.tanh(work @ work)  # the next layer's records arrive meanwhile
        where = rows.flatten()[places].long()
        read.append([place.slots[where] for place in layer.cache.storage.placements])
    for layer, records in zip(layers, read):
        for place, found in zip(layer.cache.storage.placements, records):
            if not torch.equal(found.cpu(), place.source.tensor[experts.long()]):
                raise Difference(f"{place.source.label}: a row holds the wrong record")


def test_layers_that_are_fetched_ahead_read_their_own_records(library, device, monkeypatch):
    allocator, preloader = Allocator(library, device), Preloader(device)
    layers = [
        CachedLayer(library, device, "virtual", allocator=allocator, region=number % 2)
        for number in range(4)
    ]
    preloaded = []
    original = ExpertCache.preload
    monkeypatch.setattr(
        ExpertCache, "preload", lambda cache, stream: preloaded.append(original(cache, stream))
    )
    wide = IDS_PER_EXPERT * EXPERTS // TOP_K
    for ids in steps(8, [wide, wide, 1, wide, 16] * 5):
        a_pass(layers, preloader, ids, ahead=len(ids) == wide)
    assert len(preloaded) == 3 * 15
    # The control: with one set of overflow rows for all, a layer reads what is not its own.
    alike = [CachedLayer(library, device, "virtual", allocator=allocator) for _ in range(4)]
    for layer in alike[1::2]:
        for entry in layer.tensors:
            entry.tensor.neg_()
    with pytest.raises(Difference, match="wrong record"):
        for ids in steps(8, [wide] * 5):
            a_pass(alike, preloader, ids, ahead=True)


def test_a_wrong_record_is_noticed(layer):
    """The control: records that change on the host after they were fetched are seen."""
    ids = steps(6, [1])[0]
    layer.step(ids)
    next(iter(layer.tensors)).tensor[int(ids[0, 0])] += 1
    with pytest.raises(Difference, match="wrong record"):
        layer.step(ids)


def test_many_steps_take_no_memory(layer, used_bytes):
    work = steps(7, [1, 16])
    for ids in work:
        layer.step(ids)
    before, allocated = used_bytes(), torch.cuda.memory_allocated()
    for _ in range(200):
        for ids in work:
            buffer, _, replay, _ = layer._graphs[len(ids)]
            buffer.copy_(torch.from_numpy(ids))
            replay()
        layer.cache.run(buffer, ROWS if layer.cache.storage.kind == "virtual" else SCRATCH)
    assert torch.cuda.memory_allocated() == allocated
    assert used_bytes() <= before
