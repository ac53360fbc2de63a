"""Counters that outlive the process.

Every model that is armed gets one *snapshot file*. The kernels store their counters straight
into it (`manage` has a store-only mirror, see docs/kernels.md), so the file is current without
a thread, without a call into the GPU runtime, and after the worker is killed.

The content of the file, after the header of `mapped_file`, is int64 `[layers, 8]` counters and,
from version 2 on, int64 `[layers]`: 1 for a layer that the cache serves no longer.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .log import logger
from .mapped_file import MappedFile, locate
from .policy import COUNTERS
from .processes import Process, is_alive, lineage
from .untrusted import fields, is_own_folder, own_folder, read_file

# vLLM configures handlers for loggers below "vllm" only.

_MAGIC = b"XPCACHE1"
_SUFFIX = ".counters"
_VERSION = 2  # a header without one is of version 1
_MOST = 64 * 2**20  # bytes of a snapshot that is read

_FIELDS = {
    "engine": str, "rank": int, "model": str, "policy": str, "started": float, "layers": list
}  # fmt: skip
_LAYER_FIELDS = {
    "name": str, "experts": int, "slots": int, "record_bytes": int, "tensors": int,
    "storage": str, "private_bytes": int, "shared_bytes": int,
}  # fmt: skip


class SnapshotError(ValueError):
    """A file that is not a snapshot, or not a whole one."""


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot file holds: `counters` is int64 `[layers, 8]`, a copy. `given_back`, bool
    `[layers]`: whether vLLM's own path serves a layer again; what it had counted stays.

    `lineage` is the worker and its ancestors as they were when it was armed, `engine` what ranks
    of one engine have in common, "" where vLLM does not say. Ratios are None where there is
    nothing to divide by.
    """

    path: Path
    lineage: list[Process]
    engine: str
    rank: int
    model: str
    policy: str
    started: float
    layers: list[dict]
    counters: np.ndarray
    given_back: np.ndarray

    @property
    def armed_layers(self) -> list[dict]:
        """Those that the cache serves."""
        return [layer for layer, gone in zip(self.layers, self.given_back) if not gone]

    @property
    def pid(self) -> int:
        return self.lineage[0].pid

    def is_alive(self) -> bool:
        """Whether the worker still runs; one in another pid namespace does not seem to."""
        return is_alive(self.lineage[0])

    def since(self, before: Snapshot) -> Snapshot:
        """The same with what was counted after `before` was read. A layer whose cache was
        emptied in between has counted from zero."""
        counted = self.counters - before.counters
        emptied = (counted < 0).any(axis=1, keepdims=True)
        return replace(self, counters=np.where(emptied, self.counters, counted))

    def total(self, counter: str) -> int:
        """The sum of one counter over all layers."""
        return int(self.by_layer(counter).sum())

    def fetched_bytes(self) -> int:
        """Bytes read from the host copies."""
        misses = self.by_layer("misses")
        return sum(int(m) * layer["record_bytes"] for m, layer in zip(misses, self.layers))

    def hit_rate(self) -> float | None:
        """The share of the routed experts that were resident."""
        hits = self.total("hits")
        return _ratio(hits, hits + self.total("misses"))

    def layer_hit_rates(self) -> list[float | None]:
        pairs = zip(self.by_layer("hits").tolist(), self.by_layer("misses").tolist())
        return [_ratio(hits, hits + misses) for hits, misses in pairs]

    def overflow_share(self) -> float | None:
        """The share of the misses that found no slot."""
        return _ratio(self.total("overflow"), self.total("misses"))

    def layer_steps(self) -> int:
        """Layer-steps that reached the cache, idle and read-through ones included."""
        return sum(map(self.total, ("steps", "idle", "read_through")))

    def read_through_share(self) -> float | None:
        """The share of the layer-steps that vLLM's own path served."""
        return _ratio(self.total("read_through"), self.layer_steps())

    def width(self) -> float | None:
        """Experts that a layer-step routes to on average."""
        return _ratio(self.total("hits") + self.total("misses"), self.total("steps"))

    def by_layer(self, counter: str) -> np.ndarray:
        """One counter, int64 `[layers]`."""
        return self.counters[:, COUNTERS.index(counter)]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class SnapshotFile(MappedFile):
    """The writer's side: hands out the memory of each layer's counters."""

    def __init__(
        self, folder: Path, model: str, rank: int, layers: list[dict], engine: str = "",
        policy: str = "",
    ) -> None:  # fmt: skip
        header = {"version": _VERSION, "lineage": lineage(), "engine": engine, "rank": rank,
                  "model": model, "policy": policy, "started": time.time(),
                  "layers": layers}  # fmt: skip
        self._words_at = len(layers) * len(COUNTERS) * 8
        super().__init__(folder, _SUFFIX, _MAGIC, header, self._words_at + len(layers) * 8)

    def mirror(self, index: int) -> np.ndarray:
        """The counters of one layer, int64 [8], as the memory of the file itself."""
        return self.content("<i8", len(COUNTERS), index * len(COUNTERS) * 8)

    def note_given_back(self, index: int, given_back: bool) -> None:
        """Whether vLLM's own path serves a layer from now on."""
        self.content("<i8", 1, self._words_at + index * 8)[0] = given_back


def default_folder() -> Path:
    """Where snapshots go unless EXPERT_CACHE_SNAPSHOT says otherwise: memory, owner only."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"expert-cache-{os.getuid()}"


def folder_of(setting: str | None) -> Path:
    """The folder that EXPERT_CACHE_SNAPSHOT means; unset, the default one."""
    return Path(setting) if setting else default_folder()


def open_snapshot(
    setting: str | None, model: str, rank: int, layers: list[dict], engine: str = "",
    policy: str = "",
) -> SnapshotFile | None:  # fmt: skip
    """The snapshot file of one model, or None where it is switched off or cannot be written.

    `setting` is EXPERT_CACHE_SNAPSHOT: a folder, "off", or None for the default folder.
    """
    if setting == "off":
        return None
    folder = folder_of(setting)
    try:
        make_ready(folder, setting, _SUFFIX)
        return SnapshotFile(folder, model, rank, layers, engine, policy)
    except Exception as error:  # the cache works without it
        logger.warning(
            "expert cache: no counter snapshot in %s (%s); set EXPERT_CACHE_SNAPSHOT to a "
            "writable folder, or to off. The cache itself is not affected.", folder, error,
        )  # fmt: skip
        return None


def read_snapshot(path: str | os.PathLike, owner: int | None = None) -> Snapshot:
    """Reads one file, while its worker runs or after it has gone. owner: the user whose file it
    must be.

    Raises SnapshotError if the file is not a whole snapshot, OSError if it cannot be read.
    """
    data = read_file(path, _MOST, owner=owner)
    if len(data) < 16 or data[:8] != _MAGIC:
        raise SnapshotError(f"{path}: not an expert cache snapshot")
    try:
        text, offset = locate(data, _MAGIC)
        header = _header(text)
        rows = len(header["layers"])
        columns = len(COUNTERS) + (header["version"] > 1)
        content = np.frombuffer(data, "<i8", rows * columns, offset)
        counters = content[: rows * len(COUNTERS)].reshape(rows, len(COUNTERS)).copy()
        given_back = np.zeros(rows, bool)
        if header["version"] > 1:
            given_back = content[rows * len(COUNTERS) :] != 0
        known = {name: value for name, value in header.items() if name != "version"}
        return Snapshot(Path(path), counters=counters, given_back=given_back, **known)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{path}: damaged snapshot ({error})") from None


@functools.lru_cache(maxsize=64)
def _header(text: bytes) -> dict[str, Any]:
    """Parsed once a file: whoever watches a worker reads it every second."""
    header = json.loads(text)
    known = fields(header, _FIELDS)
    known["layers"] = [fields(layer, _LAYER_FIELDS) for layer in known["layers"]]
    processes = [Process(pid, start) for pid, start in header["lineage"]]
    if not processes or any(type(number) is not int for one in processes for number in one):
        raise ValueError("no lineage")
    version = header.get("version", 1)
    if version not in (1, _VERSION):
        raise ValueError("of another release: use its own command to read it")
    return {"version": version, "lineage": processes, **known}


def read_folder(
    folder: str | os.PathLike | None = None, owner: int | None = None
) -> list[Snapshot]:
    """Every readable snapshot of a folder, oldest first; damaged files are left out, and so is
    all of a default folder that is not this user's own. owner: only the files of this user."""
    snapshots = []
    for path in files_of(Path(folder or default_folder()), _SUFFIX):
        try:
            snapshots.append(read_snapshot(path, owner))
        except (SnapshotError, OSError):
            continue
    return sorted(snapshots, key=lambda snapshot: snapshot.started)


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a suffix in a folder that processes leave files in; none of a default folder
    that is not this user's own."""
    if folder == default_folder() and not is_own_folder(folder):
        return []
    try:
        return list(folder.glob(f"*{suffix}"))
    except OSError:  # a name that no folder can have
        return []


def make_ready(folder: Path, setting: str | None, suffix: str) -> None:
    """Before a new file of a suffix is written to the folder that a setting means. Raises
    OSError."""
    if not setting:
        own_folder(folder)
        _remove_stale(folder, suffix)


def _remove_stale(folder: Path, suffix: str, days: float = 1.0) -> None:
    """Forgets workers that ended more than a day ago."""
    for path in folder.glob(f"*{suffix}"):
        try:
            pid = int(path.name.split("-", 1)[0])
            if path.stat().st_mtime < time.time() - days * 86400 and not _alive(pid):
                path.unlink()
        except (OSError, ValueError, OverflowError):  # a number that no process can have
            continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
