"""The counters on vLLM's own `/metrics`, for Prometheus.

The API server answers `/metrics`, the workers count, and both are processes of their own. So the
server reads, at each scrape, the snapshot files of its workers: those whose lineage it is part
of. No worker takes part in that.

Names follow Prometheus's conventions: base units, `_total` for counters. Ratios are left to
queries. With EXPERT_CACHE_METRICS=layer the same series carry one more label in place of sums, so
that a query with `sum by (model, rank)` reads both.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import wrapt
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from . import __version__
from .log import logger
from .policy import COUNTERS
from .processes import Process, lineage
from .settings import Settings, SettingsError
from .telemetry import Snapshot, folder_of, read_folder

PREFIX = "expert_cache_"


class _Series(NamedTuple):
    """One metric; `value` takes a layer's description and its counters by name."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    value: Callable[[dict[str, Any], dict[str, int]], float]


def _counter(name: str, help: str, counter: str) -> _Series:
    return _Series(name, CounterMetricFamily, help, lambda layer, counts: counts[counter])


def _gauge(name: str, help: str, field: str) -> _Series:
    return _Series(name, GaugeMetricFamily, help, lambda layer, counts: layer[field])


SERIES = (
    _counter("steps", "Layer-steps that routed to an expert.", "steps"),
    _counter("hits", "Routed experts that were in device memory.", "hits"),
    _counter("misses", "Routed experts that were fetched from the host.", "misses"),
    _counter("overflow_fetches", "Misses that found no slot.", "overflow"),
    _counter("evictions", "Experts that lost their slot.", "evictions"),
    _counter("routing_ids", "Routing ids, repeats included.", "ids"),
    _counter("idle_steps", "Layer-steps that routed to no expert.", "idle"),
    _counter(
        "read_through_steps", "Layer-steps that vLLM's own path served from the host.",
        "read_through",
    ),
    _Series(
        "fetched_bytes", CounterMetricFamily, "Bytes of experts read from the host.",
        lambda layer, counts: counts["misses"] * layer["record_bytes"],
    ),
    _gauge("slots", "Experts that stay in device memory.", "slots"),
    _gauge("experts", "Experts of the armed layers.", "experts"),
    _gauge("slot_memory_bytes", "Device memory of the slots.", "private_bytes"),
    _gauge(
        "shared_memory_bytes", "Device memory that layers share for steps wider than the slots.",
        "shared_bytes",
    ),
    _Series(
        "host_memory_bytes", GaugeMetricFamily, "Host memory of the armed layers' experts.",
        lambda layer, counts: layer["experts"] * layer["record_bytes"],
    ),
)  # fmt: skip


def register() -> None:
    """Adds the counters to whatever this process answers on /metrics.

    With one API server that is Prometheus's default registry. With several, each scrape makes a
    registry of its own around a MultiProcessCollector, which reads what processes of vLLM left
    in files: ours joins it there.
    """
    try:
        settings = Settings.from_environment()
    except SettingsError:
        return  # the worker says so, and arms nothing
    if "off" in (settings.metrics, settings.snapshot):
        return
    collector = CacheCollector(folder_of(settings.snapshot), settings.metrics == "layer")
    REGISTRY.register(collector)

    def join(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        registry = args[0] if args else kwargs.get("registry")
        if registry is not None:
            registry.register(collector)

    wrapt.wrap_function_wrapper(
        "prometheus_client.multiprocess", "MultiProcessCollector.__init__", join
    )


class CacheCollector:
    """What Prometheus asks at each scrape."""

    def __init__(self, folder: Path, by_layer: bool) -> None:
        self._folder = folder
        self._by_layer = by_layer
        self._failed = False

    def describe(self) -> list[Metric]:
        """Nothing, so that a registry does not read files to learn names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Never raises: the rest of /metrics is not to be lost over these."""
        try:
            # Whoever may write to a folder that was named could speak for this server's workers.
            found = read_folder(self._folder, owner=os.getuid())
            return list(families(served_here(found), self._by_layer))
        except Exception:
            if not self._failed:
                logger.exception(
                    "expert cache: unexpected error; /metrics lacks the counters of the cache"
                )
            self._failed = True
            return []


def served_here(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Those of running workers of this server; of two that say to be the same rank of the same
    model the later, because an engine may be built anew in its process."""
    roots = set(_roots())
    latest: dict[tuple[str, int], Snapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.started):
        if not roots.isdisjoint(snapshot.lineage) and snapshot.is_alive():
            latest[snapshot.model, snapshot.rank] = snapshot
    return list(latest.values())


def _roots() -> Iterator[Process]:
    """The processes whose descendants are this server's workers.

    One API server starts its engine itself. Of several, a process that is the parent of them all
    has started the engines, and has set PROMETHEUS_MULTIPROC_DIR for its children.
    """
    own = lineage()
    yield own[0]
    parent = multiprocessing.parent_process()
    if parent is not None and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        yield from (process for process in own if process.pid == parent.pid)


def families(snapshots: list[Snapshot], by_layer: bool) -> Iterator[Metric]:
    """The metrics with their samples, a sample for each rank, or each layer of each rank."""
    if not snapshots:
        return
    labels = ["model", "rank", *(["layer"] if by_layer else [])]
    for series in SERIES:
        family = series.kind(PREFIX + series.name, series.help, labels=labels)
        for snapshot in snapshots:
            of = [snapshot.model, str(snapshot.rank)]
            values = {
                layer["name"]: series.value(layer, dict(zip(COUNTERS, counts.tolist())))
                for layer, counts in zip(_as_served(snapshot), snapshot.counters)
            }
            if by_layer:
                for name, value in values.items():
                    family.add_metric([*of, name], value)
            else:
                family.add_metric(of, sum(values.values()))
        yield family
    yield from _of_models(snapshots)


def _as_served(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    """A layer that was given back has no slots and no experts here; its device memory stays."""
    for layer, given_back in zip(snapshot.layers, snapshot.given_back):
        yield {**layer, "slots": 0, "experts": 0} if given_back else layer


def _of_models(snapshots: list[Snapshot]) -> Iterator[Metric]:
    layers = GaugeMetricFamily(
        f"{PREFIX}armed_layers", "Layers that the cache serves.", labels=["model", "rank"]
    )
    started = GaugeMetricFamily(
        f"{PREFIX}start_time_seconds", "When the model was armed, in seconds since the epoch.",
        labels=["model", "rank"],
    )  # fmt: skip
    about = GaugeMetricFamily(
        f"{PREFIX}info", "1, with what is told of a cache in words.",
        labels=["model", "rank", "policy", "storage", "version"],
    )  # fmt: skip
    for snapshot in snapshots:
        of = [snapshot.model, str(snapshot.rank)]
        kinds = sorted({layer["storage"] for layer in snapshot.layers})
        layers.add_metric(of, len(snapshot.armed_layers))
        started.add_metric(of, snapshot.started)
        about.add_metric([*of, snapshot.policy, "/".join(kinds), __version__], 1)
    yield from (layers, started, about)
