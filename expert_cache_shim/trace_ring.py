"""The recent routing of a running model, in a file that other processes read.

A ring of tokens: token `p` of all lies in row `p % tokens` until `p + tokens` is written. The
content of the file, after the header of `mapped_file`:

- int64 [4]: `begun`, tokens whose rows the device may be writing or has written; `done`, tokens
  whose rows are whole; `passes`, forward passes; `resets`, how often all of it began anew.
- int64 [tokens]: the pass of a row's token.
- int16 [tokens, layers, top_k]: its routing ids, -1 for none.

The device advances `begun` before it writes rows and `done` after, and knows nothing of readers.
A reader that is more than `tokens` behind has lost what was overwritten, and counts it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .mapped_file import MAX_HEADER, locate
from .policy import MAX_EXPERTS
from .processes import Process, is_alive
from .trace import MAX_LAYERS, MAX_TOP_K, NO_EXPERT, Trace, TraceError, complete
from .untrusted import fields, open_file, read_at

MAGIC = b"XPTRACE1"
SUFFIX = ".routing"
RING_BYTES = 32 * 2**20
MAX_TOKENS = 2**17
_MOST = 2 * RING_BYTES  # bytes of a ring that is read, its header included
_FIELDS = {
    "process": list, "rank": int, "model": str, "started": float, "experts": int,
    "tokens": int, "layers": int, "top_k": int,
}  # fmt: skip
STATE = ("begun", "done", "passes", "resets")


class RingError(ValueError):
    """A file that holds no recent routing, or is damaged."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of the content begin, in bytes, and how long all of it is."""

    tokens: int
    layers: int
    top_k: int

    @classmethod
    def of(cls, layers: int, top_k: int) -> Layout:
        """As many tokens as RING_BYTES hold."""
        return cls(min(MAX_TOKENS, max(1, RING_BYTES // (8 + 2 * layers * top_k))), layers, top_k)

    @property
    def passes_at(self) -> int:
        return 8 * len(STATE)

    @property
    def ids_at(self) -> int:
        return self.passes_at + 8 * self.tokens

    @property
    def length(self) -> int:
        return self.ids_at + 2 * self.tokens * self.layers * self.top_k


@dataclass(frozen=True)
class Rows:
    """What a reader took: int64 `[tokens]` passes, int16 `[tokens, layers, top_k]` ids. lost:
    tokens before them that were overwritten unread. reset: the ring began anew before them."""

    passes: np.ndarray
    ids: np.ndarray
    lost: int = 0
    reset: bool = False


class Reader:
    """Follows a ring from the oldest token that it still holds."""

    def __init__(self, path: Path) -> None:
        """Raises RingError for another kind of file, OSError if it cannot be read."""
        self.path = path
        self._file = open_file(path, _MOST)
        size = os.fstat(self._file.fileno()).st_size
        data = read_at(self._file, 0, min(size, 16 + MAX_HEADER))
        try:
            text, self._start = locate(data, MAGIC)
            self.header = _header(json.loads(text))
            self.layout = layout = Layout(*(self.header[n] for n in ("tokens", "layers", "top_k")))
            if self._start + layout.length != size:
                raise ValueError(f"damaged ({size} bytes)")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise RingError(f"{path}: no recent routing: {error}") from None
        _, done, _, self._resets = self._state()
        self._next = max(0, done - layout.tokens)

    @property
    def model(self) -> str:
        return self.header["model"]

    @property
    def pid(self) -> int:
        return self.header["process"].pid

    def is_alive(self) -> bool:
        """Whether the worker still runs; one in another pid namespace does not seem to."""
        return is_alive(self.header["process"])

    def read(self) -> Rows:
        """The tokens that are whole and were not read yet. Raises OSError for a file that was cut
        off meanwhile."""
        _, done, _, resets = self._state()
        reset = resets != self._resets
        if reset:
            self._resets, self._next = resets, 0
        first = max(self._next, done - self.layout.tokens)
        passes, ids = self._rows(first, max(first, done))
        # What the device began to overwrite meanwhile is no good.
        begun, _, _, resets = self._state()
        good = min(max(first, begun - self.layout.tokens), done)
        if done <= self._next or resets != self._resets:
            return Rows(passes[:0], ids[:0], reset=reset)
        lost, self._next = good - self._next, done
        return Rows(passes[good - first :], ids[good - first :], lost, reset)

    def _state(self) -> list[int]:
        return self._numbers("<i8", 0, len(STATE)).tolist()

    def _rows(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Passes and ids of tokens `first` to `end`, at most as many as there are rows."""
        layout = self.layout
        shape = (-1, layout.layers, layout.top_k)
        passes, ids = [], []
        while True:
            row = first % layout.tokens
            count = min(end - first, layout.tokens - row)
            passes.append(self._numbers("<i8", layout.passes_at + 8 * row, count))
            of_token = layout.layers * layout.top_k
            at = layout.ids_at + 2 * of_token * row
            ids.append(self._numbers("<i2", at, count * of_token).reshape(shape))
            first += count
            if first == end:
                return np.concatenate(passes), np.concatenate(ids)

    def _numbers(self, dtype: str, at: int, count: int) -> np.ndarray:
        length = count * np.dtype(dtype).itemsize
        return np.frombuffer(read_at(self._file, self._start + at, length), dtype)


def _header(header: Any) -> dict[str, Any]:
    """Raises ValueError and the like for a header that no writer made."""
    known = fields(header, _FIELDS)
    limits = (("tokens", MAX_TOKENS), ("layers", MAX_LAYERS), ("top_k", MAX_TOP_K))
    for name, most in (*limits, ("experts", MAX_EXPERTS)):
        if not 1 <= known[name] <= most:
            raise ValueError(f"{name} is {known[name]}")
    known["process"] = Process(*known["process"])
    expert_map = header.get("expert_map")
    rows = range(-1, known["experts"])
    if expert_map is not None and not (
        type(expert_map) is list and all(type(row) is int and row in rows for row in expert_map)
    ):
        raise ValueError("expert_map is no list of the rank's experts")
    if not all(type(number) is int for number in known["process"]):
        raise ValueError("no writer")
    return {**known, "expert_map": expert_map}


def to_trace(header: dict[str, Any], taken: list[Rows]) -> Trace:
    """One trace of what a reader took. Under expert parallelism the ids are those of the rank's
    own experts, as its caches number them. Raises TraceError for what no model ran."""
    ids = np.concatenate([rows.ids for rows in taken])
    passes = np.concatenate([rows.passes for rows in taken])
    if (passes[1:] < passes[:-1]).any():
        raise TraceError("passes are not in their order")
    expert_map = header.get("expert_map")
    if expert_map is not None:
        known = np.append(np.array(expert_map, np.int64), -1)  # the last for ids that are none
        ids = known[np.where((ids >= 0) & (ids < len(expert_map)), ids, -1)]
    meta = {
        "model": header.get("model"),
        "num_experts": header.get("experts"),
        "source": "recorded from a running server",
        "rank": header.get("rank"),
        "lost_tokens": sum(rows.lost for rows in taken),
    }
    ids = np.where(ids < 0, np.int32(NO_EXPERT), ids).astype(np.uint16)
    return Trace(ids, np.zeros(len(ids), np.int32), passes, complete(meta, ids))
