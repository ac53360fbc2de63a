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
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .mapped_file import locate
from .processes import Process, is_alive
from .trace import NO_EXPERT, Trace, complete

MAGIC = b"XPTRACE1"
SUFFIX = ".routing"
RING_BYTES = 32 * 2**20
MAX_TOKENS = 2**17
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
        with path.open("rb") as stream:
            try:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # empty
                raise RingError(f"{path}: {error}") from None
        try:
            text, offset = locate(self._map, MAGIC)
            self.header = json.loads(text)
            self.layout = layout = _layout(self.header)
            if offset + layout.length != len(self._map):
                raise ValueError(f"damaged ({len(self._map)} bytes)")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RingError(f"{path}: no recent routing: {error}") from None
        array = np.frombuffer(self._map, np.uint8, offset=offset)
        self._state = array[: layout.passes_at].view("<i8")
        self._passes = array[layout.passes_at : layout.ids_at].view("<i8")
        self._ids = array[layout.ids_at :].view("<i2").reshape(-1, layout.layers, layout.top_k)
        self._resets = int(self._state[3])
        self._next = max(0, int(self._state[1]) - layout.tokens)

    @property
    def model(self) -> str:
        return self.header["model"]

    @property
    def pid(self) -> int:
        return self.header["process"][0]

    def is_alive(self) -> bool:
        """Whether the worker still runs; one in another pid namespace does not seem to."""
        return is_alive(Process(*self.header["process"]))

    def read(self) -> Rows:
        """The tokens that are whole and were not read yet."""
        resets, done = int(self._state[3]), int(self._state[1])
        reset = resets != self._resets
        if reset:
            self._resets, self._next = resets, 0
        first = max(self._next, done - self.layout.tokens)
        rows = np.arange(first, done) % self.layout.tokens
        passes, ids = self._passes[rows], self._ids[rows]
        # What the device began to overwrite meanwhile is no good.
        good = min(max(first, int(self._state[0]) - self.layout.tokens), done)
        if done <= self._next or resets != int(self._state[3]):
            return Rows(passes[:0], ids[:0], reset=reset)
        lost, self._next = good - self._next, done
        return Rows(passes[good - first :], ids[good - first :], lost, reset)


def _layout(header: dict[str, Any]) -> Layout:
    """Raises KeyError or ValueError for a header that no writer made."""
    sizes = [header[name] for name in ("tokens", "layers", "top_k")]
    numbers = [*sizes, header["experts"], header["rank"], *header["process"], header["started"]]
    if not all(type(n) in (int, float) and n >= 0 for n in numbers) or min(sizes) < 1:
        raise ValueError(f"damaged (sizes {sizes})")
    if len(header["process"]) != 2 or not isinstance(header["model"], str):
        raise ValueError("damaged (no writer)")
    return Layout(*map(int, sizes))


def to_trace(header: dict[str, Any], taken: list[Rows]) -> Trace:
    """One trace of what a reader took. Under expert parallelism the ids are those of the rank's
    own experts, as its caches number them."""
    ids = np.concatenate([rows.ids for rows in taken])
    passes = np.concatenate([rows.passes for rows in taken])
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
    ids = np.where(ids < 0, NO_EXPERT, ids).astype(np.uint16)
    return Trace(ids, np.zeros(len(ids), np.int32), passes, complete(meta, ids))
