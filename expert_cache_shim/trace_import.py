"""Makes a trace of the arrays that vLLM returns where it is asked for routed experts.

`--enable-return-routed-experts` (read in vLLM 0.25.1 and 0.32.0) puts an integer array `[tokens,
layers, top_k]` on every finished output: the tokens of the prompt and those generated, but for
the last, which no layer has seen. Over HTTP it is base64 of a `.npy` file.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .trace import MAX_BYTES, NO_EXPERT, Trace, TraceError, check_shape, complete, read_array
from .untrusted import open_file

MAX_JSON_BYTES = 2**27  # in memory it can be twenty times as large


def load(path: Path) -> list[np.ndarray]:
    """The arrays of a `.npy` file, or of every `routed_experts` in a response saved as JSON.

    Raises TraceError for a file with none, OSError if it cannot be read.
    """
    with open_file(path, 2 * MAX_BYTES, links=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            if stream.read(6) == np.lib.format.MAGIC_PREFIX:
                stream.seek(0)
                return [_routed(stream, size)]
            stream.seek(0)
            return list(_of_response(stream, size))
        except Exception as error:  # numpy's, json's and base64's own
            detail = " ".join(str(error).split())[:200] or type(error).__name__
            raise TraceError(f"{path}: has no routed experts: {detail}") from None


def _routed(stream: BinaryIO, size: int) -> np.ndarray:
    array = read_array(stream, size, "routed_experts", 3)
    if array.dtype.kind not in "iu":
        raise TraceError(f"'routed_experts' is {array.dtype}")
    check_shape("routed_experts", array)
    outside = (array < 0) | (array >= NO_EXPERT)
    ids = array.astype(np.uint16)
    ids[outside] = NO_EXPERT
    return ids


def _of_response(stream: BinaryIO, size: int) -> Iterator[np.ndarray]:
    if size > MAX_JSON_BYTES:
        raise TraceError(f"{size} bytes of JSON, allowed are {MAX_JSON_BYTES}")
    texts = list(_texts(json.load(stream)))
    if not texts:
        raise TraceError("no 'routed_experts' in it: was the server started with "
                         "--enable-return-routed-experts?")  # fmt: skip
    for text in texts:
        data = base64.b64decode(text, validate=True)
        yield _routed(io.BytesIO(data), len(data))


def _texts(value: Any) -> Iterator[str]:
    """Every `routed_experts` that is there, however deep."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "routed_experts" and isinstance(inner, str):
                yield inner
            else:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def join(arrays: Sequence[np.ndarray], prompt_tokens: Sequence[int], meta: dict[str, Any]) -> Trace:
    """One trace of the arrays of several requests, one after the other, as if nothing had run
    beside them. prompt_tokens: of each request, how many tokens at its start are the prompt,
    which ran in one forward pass. Raises TraceError where the arrays do not fit together."""
    if len({array.shape[1:] for array in arrays}) > 1:
        shapes = " and ".join(sorted({str(list(array.shape[1:])) for array in arrays}))
        raise TraceError(f"arrays of different models: layers and experts a token are {shapes}")
    passes = [
        np.maximum(np.arange(len(array)), prompt - 1)
        for array, prompt in zip(arrays, prompt_tokens)
    ]
    starts = np.cumsum([0, *(len(array) for array in arrays)])
    ids = np.concatenate(arrays)
    check_shape("routed_experts", ids)
    return Trace(
        ids,
        np.repeat(np.arange(len(arrays), dtype=np.int32), np.diff(starts)),
        np.concatenate([start + number for start, number in zip(starts, passes)]),
        complete(meta, ids),
    )
