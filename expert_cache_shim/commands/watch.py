"""Reads the counters of every worker in a folder, again and again, engine by engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..telemetry import Snapshot, read_folder


@dataclass(frozen=True)
class Rank:
    """One worker: all that it has counted, and what since the reading before (None: first)."""

    now: Snapshot
    recent: Snapshot | None
    seconds: float

    def bytes_per_second(self) -> float:
        """What was fetched since the reading before."""
        return self.recent.fetched_bytes() / self.seconds

    def passes_per_second(self) -> float:
        """Forward passes: every layer that is served counts each of them once."""
        return self.recent.layer_steps() / max(1, len(self.recent.armed_layers)) / self.seconds


@dataclass(frozen=True)
class Engine:
    """The ranks of one running engine."""

    model: str
    ranks: list[Rank]

    def layer_hit_rates(self, recent: bool = False) -> dict[str, float | None]:
        """By layer, over all ranks that hold it."""
        hits: Counter[str] = Counter()
        routed: Counter[str] = Counter()
        for rank in self.ranks:
            snapshot = rank.recent if recent and rank.recent else rank.now
            names = [layer["name"] for layer in snapshot.layers]
            hits.update(dict(zip(names, snapshot.by_layer("hits").tolist())))
            routed.update(dict(zip(names, snapshot.by_layer("hits").tolist())))
            routed.update(dict(zip(names, snapshot.by_layer("misses").tolist())))
        return {name: hits[name] / count if count else None for name, count in routed.items()}


@dataclass(frozen=True)
class Reading:
    """What a folder held at one moment."""

    folder: Path
    engines: list[Engine]
    ended: list[Snapshot]


class Watch:
    """Reads a folder again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[Path, Snapshot] = {}
        self._read_at = 0.0

    def read(self) -> Reading:
        moment = time.monotonic()
        snapshots = read_folder(self._folder)
        engines: dict[str, list[Rank]] = {}
        ended = []
        for snapshot in snapshots:
            if not snapshot.is_alive():
                ended.append(snapshot)
                continue
            before = self._before.get(snapshot.path)
            recent = snapshot.since(before) if before else None
            rank = Rank(snapshot, recent, moment - self._read_at)
            # vLLM that does not name its engines: each worker stands for itself.
            engines.setdefault(snapshot.engine or str(snapshot.path), []).append(rank)
        self._before = {snapshot.path: snapshot for snapshot in snapshots}
        self._read_at = moment
        return Reading(self._folder, list(_by_model(engines)), ended)


def _by_model(engines: dict[str, list[Rank]]) -> Iterator[Engine]:
    for ranks in engines.values():
        models: dict[str, list[Rank]] = {}
        for rank in sorted(ranks, key=lambda rank: rank.now.rank):
            models.setdefault(rank.now.model, []).append(rank)
        for model, of_model in models.items():
            yield Engine(model, of_model)
