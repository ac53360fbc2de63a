"""Recorded routing: the trace file, as docs/trace.md describes it.

A trace says which experts each token was routed to, layer by layer, in the order in which the
model ran them. This module needs numpy only, and trusts no file.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .policy import MAX_EXPERTS
from .untrusted import open_file

# In `ids`: no expert. A token of fewer experts than others, or one that a rank does not own.
NO_EXPERT = 65535

MAX_TOP_K = 256
MAX_LAYERS = 4096
MAX_TOKENS = 2**24
MAX_BYTES = 2**31  # of one array, unpacked
MAX_HEADER = 2**14  # of one array; numpy writes less than a hundred bytes
MAX_META_BYTES = 2**20


class TraceError(ValueError):
    """A file that is no trace. One line: the file, and what is wrong with it."""


@dataclass(frozen=True)
class Trace:
    """Tokens in the order in which a model ran them.

    ids: uint16 `[tokens, layers, top_k]`, expert numbers below `experts`, or NO_EXPERT.
    seq: int32 `[tokens]`, the prompt that a token belongs to.
    step: int64 `[tokens]`, not falling: tokens of one number ran in the same forward pass.
    meta: what is known of the origin; `num_experts` is always there.
    """

    ids: np.ndarray
    seq: np.ndarray
    step: np.ndarray
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        return self.meta["num_experts"]

    @property
    def layers(self) -> int:
        return self.ids.shape[1]

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    @property
    def bounds(self) -> np.ndarray:
        """int64 `[steps + 1]`: step `i` is the tokens `bounds[i]` to `bounds[i + 1]`."""
        changes = np.flatnonzero(np.diff(self.step)) + 1
        return np.concatenate(([0], changes, [len(self.step)]))

    @property
    def steps(self) -> int:
        """Forward passes."""
        return len(self.bounds) - 1

    def first(self, steps: int) -> Trace:
        """The trace up to a number of forward passes."""
        tokens = self.bounds[min(steps, self.steps)]
        return Trace(self.ids[:tokens], self.seq[:tokens], self.step[:tokens], self.meta)

    def routed(self) -> Iterator[np.ndarray]:
        """For each step the experts routed in each layer, bool `[layers, experts]`. The array is
        the iterator's own and good until the next."""
        spare = self.experts  # a column for ids that are no expert
        rows = np.arange(self.layers)[:, None]
        mask = np.zeros((self.layers, spare + 1), bool)
        for start, end in itertools.pairwise(self.bounds):
            mask[:] = False
            for token in np.minimum(self.ids[start:end], spare):
                mask[rows, token] = True
            yield mask[:, :spare]


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Writes a trace file; `step` only where a step has more than one token."""
    arrays = {"ids": trace.ids.astype(np.uint16), "seq": trace.seq.astype(np.int32)}
    if trace.steps < len(trace.step):
        arrays["step"] = trace.step.astype(np.int64)
    with Path(path).open("wb") as stream:  # a name without .npz stays as it is
        np.savez_compressed(stream, meta=np.array(json.dumps(trace.meta)), **arrays)


def load(path: str | os.PathLike) -> Trace:
    """Reads a trace file. Raises TraceError for a file that is none, OSError if it cannot be
    read. Nothing in it is executed, and no more memory taken than its limits allow."""
    with open_file(path, 2 * MAX_BYTES, links=True) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                return _read(archive)
        # zipfile, zlib, numpy's reader of headers and the tokenizer below it: each has its own.
        except Exception as error:
            detail = " ".join(str(error).split())[:200] or type(error).__name__
            raise TraceError(f"{path}: is not a routing trace: {detail}") from None


def _read(archive: zipfile.ZipFile) -> Trace:
    names = set(archive.namelist())
    if "ids.npy" not in names:
        raise TraceError("has no array 'ids'")
    ids = _ids(archive)
    tokens = len(ids)
    seq = _vector(archive, "seq", tokens) if "seq.npy" in names else np.zeros(tokens, np.int32)
    step = _vector(archive, "step", tokens) if "step.npy" in names else np.arange(tokens)
    if (step[1:] < step[:-1]).any():
        raise TraceError("'step' falls")
    meta = _meta(archive) if "meta.npy" in names else {}
    return Trace(ids, seq.astype(np.int32), step.astype(np.int64), complete(meta, ids))


def _array(archive: zipfile.ZipFile, name: str, dimensions: int) -> np.ndarray:
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"'{name}' is compressed as numpy does not")
    with archive.open(member) as stream:
        return read_array(stream, member.file_size, name, dimensions)


def read_array(stream: BinaryIO, length: int, name: str, dimensions: int) -> np.ndarray:
    """A `.npy` file of `length` bytes that holds integers or text. Its header is compared with
    the length before memory is taken. Raises TraceError, and what numpy has for a header that
    does not parse."""
    # numpy reads as much of a header as it says to have, up to 4 GiB.
    start = io.BytesIO(stream.read(MAX_HEADER))
    version = np.lib.format.read_magic(start)
    read_header = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
    shape, _, dtype = read_header(start)
    if dtype.kind not in "iuU" or len(shape) != dimensions or min(shape, default=0) < 0:
        raise TraceError(f"'{name}' is {dtype} of shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    if size > MAX_BYTES:
        raise TraceError(f"'{name}' has {size} bytes, allowed are {MAX_BYTES}")
    if start.tell() + size != length:
        raise TraceError(f"'{name}' of shape {shape} does not fit its {length} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _ids(archive: zipfile.ZipFile) -> np.ndarray:
    ids = _array(archive, "ids", 3)
    if ids.dtype not in (np.uint8, np.uint16):
        raise TraceError(f"'ids' is {ids.dtype}, allowed are uint8 and uint16")
    check_shape("ids", ids)
    return ids.astype(np.uint16, copy=False)


def check_shape(name: str, ids: np.ndarray) -> None:
    """Raises TraceError for ids of no tokens, or of more than is allowed."""
    limits = (MAX_TOKENS, MAX_LAYERS, MAX_TOP_K)
    if not all(1 <= size <= most for size, most in zip(ids.shape, limits)):
        raise TraceError(
            f"'{name}' is {list(ids.shape)}, allowed are 1 to {MAX_TOKENS} tokens, {MAX_LAYERS} "
            f"layers and {MAX_TOP_K} experts a token"
        )


def _vector(archive: zipfile.ZipFile, name: str, tokens: int) -> np.ndarray:
    vector = _array(archive, name, 1)
    if vector.dtype.kind not in "iu" or len(vector) != tokens:
        raise TraceError(f"'{name}' is {vector.dtype} {list(vector.shape)} for {tokens} tokens")
    return vector


def _meta(archive: zipfile.ZipFile) -> dict[str, Any]:
    if archive.getinfo("meta.npy").file_size > MAX_META_BYTES:
        raise TraceError(f"'meta' is larger than {MAX_META_BYTES} bytes")
    text = _array(archive, "meta", 0)
    try:
        meta = json.loads(str(text))
    except (ValueError, RecursionError):
        raise TraceError("'meta' is no JSON") from None
    if not isinstance(meta, dict):
        raise TraceError("'meta' is no JSON object")
    return meta


def complete(meta: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """`meta` with the number of experts, which a file may leave out: then the least that fits.
    Raises TraceError where it cannot be."""
    named = ids != NO_EXPERT
    if not named.any():
        raise TraceError("no token is routed to an expert")
    least = max(2, int(ids.max(initial=0, where=named)) + 1)
    experts = meta.get("num_experts", least)
    if type(experts) is not int or not least <= experts <= MAX_EXPERTS:
        raise TraceError(
            f"'num_experts' is {str(experts)[:40]!r} with expert {least - 1} in use, allowed are "
            f"{least} to {MAX_EXPERTS}"
        )
    return {**meta, "num_experts": experts}
