"""Counters that outlive the process, and the log lines a user sees.

Every model that is armed gets one *snapshot file*. The kernels store their counters straight
into it (`manage` has a store-only mirror, see docs/kernels.md), so the file is current without
a thread, without a call into the GPU runtime, and after the worker is killed.

File layout, little endian: 8 bytes magic, uint64 length of the JSON header, the JSON header,
zeros to the next multiple of 4096, then int64 `[layers, 8]` counters.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .policy import COUNTERS

if TYPE_CHECKING:
    from .arming import Report

# vLLM configures handlers for loggers below "vllm" only.
logger = logging.getLogger("vllm.expert_cache")

_MAGIC = b"XPCACHE1"
_PAGE = 4096
_SUFFIX = ".counters"


class SnapshotError(ValueError):
    """A file that is not a snapshot, or not a whole one."""


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot file holds: `counters` is int64 `[layers, 8]`, a copy."""

    path: Path
    pid: int
    rank: int
    model: str
    started: float
    layers: list[dict]
    counters: np.ndarray

    def total(self, counter: str) -> int:
        """The sum of one counter over all layers."""
        return int(self.counters[:, COUNTERS.index(counter)].sum())

    def fetched_bytes(self) -> int:
        """Bytes read from the host copies."""
        misses = self.counters[:, COUNTERS.index("misses")]
        return sum(int(m) * layer["record_bytes"] for m, layer in zip(misses, self.layers))


class SnapshotFile:
    """The writer's side: maps the file and hands out one address per layer."""

    def __init__(self, folder: Path, model: str, rank: int, layers: list[dict]) -> None:
        header = json.dumps(
            {"pid": os.getpid(), "rank": rank, "model": model, "started": time.time(),
             "layers": layers}
        ).encode()  # fmt: skip
        self._offset = _counters_offset(len(header))
        self.size = self._offset + len(layers) * len(COUNTERS) * 8
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(f"{_SUFFIX}", f"{os.getpid()}-", folder)
        self.path = Path(name)
        try:
            # Reserved now: a store into a hole of a full disk would be a SIGBUS later.
            os.posix_fallocate(handle, 0, self.size)
            self._map = mmap.mmap(handle, self.size)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        self._map[: 16 + len(header)] = _MAGIC + struct.pack("<Q", len(header)) + header

    @property
    def address(self) -> int:
        """Where the file is mapped, page-aligned."""
        return np.frombuffer(self._map, np.uint8).ctypes.data

    def mirror(self, index: int) -> np.ndarray:
        """The counters of one layer, int64 [8], as the memory of the file itself."""
        start = self._offset + index * len(COUNTERS) * 8
        return np.frombuffer(self._map, "<i8", len(COUNTERS), start)


def _counters_offset(header_length: int) -> int:
    return -(-(16 + header_length) // _PAGE) * _PAGE


def default_folder() -> Path:
    """Where snapshots go unless EXPERT_CACHE_SNAPSHOT says otherwise: memory, owner only."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return base / f"expert-cache-{os.getuid()}"


def open_snapshot(
    setting: str | None, model: str, rank: int, layers: list[dict]
) -> SnapshotFile | None:
    """The snapshot file of one model, or None where it is switched off or cannot be written.

    `setting` is EXPERT_CACHE_SNAPSHOT: a folder, "off", or None for the default folder.
    """
    if setting == "off":
        return None
    folder = Path(setting) if setting else default_folder()
    try:
        if not setting:
            own_folder(folder)
            _remove_stale(folder)
        return SnapshotFile(folder, model, rank, layers)
    except Exception as error:  # the cache works without it
        logger.warning(
            "expert cache: no counter snapshot in %s (%s); set EXPERT_CACHE_SNAPSHOT to a "
            "writable folder, or to off. The cache itself is not affected.", folder, error,
        )  # fmt: skip
        return None


def read_snapshot(path: str | os.PathLike) -> Snapshot:
    """Reads one file, while its worker runs or after it has gone.

    Raises SnapshotError if the file is not a whole snapshot, OSError if it cannot be read.
    """
    data = Path(path).read_bytes()
    if len(data) < 16 or data[:8] != _MAGIC:
        raise SnapshotError(f"{path}: not an expert cache snapshot")
    (length,) = struct.unpack_from("<Q", data, 8)
    if length > len(data):
        raise SnapshotError(f"{path}: damaged snapshot (header of {length} bytes)")
    offset = _counters_offset(length)
    try:
        header = json.loads(data[16 : 16 + length])
        layers = header["layers"]
        counters = np.frombuffer(data, "<i8", len(layers) * len(COUNTERS), offset)
        return Snapshot(
            Path(path), header["pid"], header["rank"], header["model"], header["started"],
            layers, counters.reshape(len(layers), len(COUNTERS)).copy(),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{path}: damaged snapshot ({error})") from None


def read_folder(folder: str | os.PathLike | None = None) -> list[Snapshot]:
    """Every readable snapshot of a folder, oldest first; damaged files are left out."""
    snapshots = []
    for path in Path(folder or default_folder()).glob(f"*{_SUFFIX}"):
        try:
            snapshots.append(read_snapshot(path))
        except (SnapshotError, OSError):
            continue
    return sorted(snapshots, key=lambda snapshot: snapshot.started)


def log_report(report: Report) -> None:
    """One line for what is armed, one for each reason why a layer is not."""
    total = len(report.armed) + len(report.refused)
    if report.storage_note:
        logger.warning("expert cache: %s", report.storage_note)
    if report.armed:
        logger.info("expert cache: %s", _armed_line(report, total))
    reasons: dict[str, list[str]] = {}
    for name, refusal in report.refused:
        reasons.setdefault(str(refusal), []).append(name)
    for reason, names in reasons.items():
        logger.warning(
            "expert cache: %d of %d MoE layers of %s not armed (%s): %s",
            len(names), total, report.model, _first(names), reason,
        )  # fmt: skip


def _armed_line(report: Report, total: int) -> str:
    caches = [layer.cache for layer in report.armed]
    slots = sorted({cache.slots for cache in caches})
    experts = sorted({cache.experts for cache in caches})
    kinds = sorted({cache.storage.kind for cache in caches})
    host = sum(c.experts * layer.record_bytes for c, layer in zip(caches, report.armed))
    return (
        f"{len(caches)} of {total} MoE layers of {report.model} armed: "
        f"{_span(slots)} of {_span(experts)} experts resident in each, {caches[0].policy_name}, "
        f"{'/'.join(kinds)} storage, "
        f"{_mib(sum(c.storage.private for c in caches))} of device memory for slots and "
        f"{_mib(sum(c.storage.shared for c in caches))} shared, "
        f"{_mib(host)} of experts on the host"
    )


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _mib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def own_folder(folder: Path) -> None:
    """Refuses a default folder that somebody else made (its name can be guessed)."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not folder.is_dir():
        raise PermissionError(f"{folder} is not a folder of this user alone")


def _remove_stale(folder: Path, days: float = 1.0) -> None:
    """Forgets workers that ended more than a day ago."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            pid = int(path.name.split("-", 1)[0])
            if path.stat().st_mtime < time.time() - days * 86400 and not _alive(pid):
                path.unlink()
        except (OSError, ValueError):
            continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
