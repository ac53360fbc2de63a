"""Writes the routing ids of each step to a ring in memory that other processes read.

Only PyTorch operations on tensors of fixed address, queued on the stream of the step: they are
captured into a graph with the step, and nothing waits for them. `trace_ring` has the layout.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import telemetry
from .log import logger
from .mapped_file import MappedFile
from .processes import lineage
from .trace_ring import MAGIC, SUFFIX, Layout

if TYPE_CHECKING:
    from .layer import ArmedLayer
    from .storage import Allocator


class Ring:
    """The device's side of a ring file."""

    def __init__(self, file: MappedFile, layout: Layout, memory: torch.Tensor) -> None:
        """memory: the content of the file as uint8 on the device whose routing it takes."""
        self.file = file
        self.tokens = layout.tokens
        self._begun, self._done, self._passes, self._resets = memory[: layout.passes_at].view(
            torch.int64
        )
        self._pass_of = memory[layout.passes_at : layout.ids_at].view(torch.int64)
        shape = (layout.tokens, layout.layers, layout.top_k)
        self._ids = memory[layout.ids_at :].view(torch.int16).view(shape)
        device = memory.device
        # Read and written every step, so kept where that is quick.
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._pass = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(layout.tokens, device=device)
        self._rows = torch.zeros(layout.tokens, dtype=torch.int64, device=device)

    def begin(self, tokens: int) -> None:
        """Takes rows for the tokens of one pass; a layer that writes none of them has no ids."""
        rows = self._rows[:tokens]
        torch.add(self._offsets[:tokens], self._position, out=rows)
        rows.remainder_(self.tokens)
        self._position.add_(tokens)
        self._begun.copy_(self._position)
        self._pass.add_(1)
        self._pass_of.index_copy_(0, rows, self._pass.expand(tokens))
        self._ids.index_fill_(0, rows, -1)

    def write(self, layer: int, ids: torch.Tensor) -> None:
        tokens, columns = ids.shape
        own = self._ids[:, layer, :columns]
        own.index_copy_(0, self._rows[:tokens], ids.to(torch.int16))

    def end(self) -> None:
        self._passes.copy_(self._pass)
        self._done.copy_(self._position)

    def reset(self) -> None:
        """As new, for readers too."""
        for value in (self._position, self._pass, self._begun, self._done, self._passes):
            value.zero_()
        self._resets.add_(1)


class Recorder:
    """Takes the ids of a model's layers, in the order in which they run. Never raises."""

    def __init__(self, layers: int, open_ring: Callable[[int], Ring | None]) -> None:
        """open_ring: makes the ring for so many ids a token, which the first step shows; None
        where it cannot be made."""
        self._last = layers - 1
        self._open_ring = open_ring
        self._ring: Ring | None = None
        self._ended = False
        self._layer = layers  # that came last
        self._tokens = -1  # of the pass under way; of none, or of one that is left out, -1

    def record(self, layer: int, ids: torch.Tensor) -> None:
        """ids: `[tokens, top_k]` of layer number `layer` of those that are armed."""
        if self._ended:
            return
        try:
            self._record(layer, ids.view(torch.int32) if ids.dtype == torch.uint32 else ids)
        except Exception:
            self._ended = True
            logger.exception("expert cache: unexpected error; routing is no longer recorded")

    def _record(self, layer: int, ids: torch.Tensor) -> None:
        if self._ring is None:
            if ids.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return  # memory cannot be registered now; vLLM runs a step before it captures
            # vLLM steps in inference mode; what is made there could not be reset outside of it.
            with torch.inference_mode(False):
                self._ring = self._open_ring(ids.shape[1])
            self._ended = self._ring is None
        if self._ring is None:
            return
        if layer <= self._layer:  # any of them may have been given back: also the first, or last
            self._begin(len(ids))
        self._layer = layer
        if len(ids) != self._tokens:  # wider than the ring, or not the tokens of the first layer
            return
        self._ring.write(layer, ids)
        if layer == self._last:
            self._end()

    def _begin(self, tokens: int) -> None:
        self._end()
        if 0 < tokens <= self._ring.tokens:
            self._ring.begin(tokens)
            self._tokens = tokens

    def _end(self) -> None:
        if self._tokens > 0:
            self._ring.end()
        self._tokens = -1

    def reset(self) -> None:
        if self._ring is not None:
            self._ring.reset()


def record_routing(
    setting: str, model: str, rank: int, layers: list[ArmedLayer], allocator: Allocator
) -> Recorder:
    """Has every layer record its ids from now on. setting: EXPERT_CACHE_TRACE, a folder or "on"
    for the one of the counters."""
    cache = layers[0].cache
    header = {
        "process": lineage()[0], "rank": rank, "model": model, "started": time.time(),
        "names": [layer.name for layer in layers],
        "experts": max(layer.cache.experts for layer in layers),
        "expert_map": None if cache.expert_map is None else cache.expert_map.tolist(),
    }  # fmt: skip
    named = None if setting == "on" else setting
    folder = telemetry.folder_of(named)

    def open_ring(top_k: int) -> Ring | None:
        layout = Layout.of(len(layers), top_k)
        sizes = {"tokens": layout.tokens, "layers": len(layers), "top_k": top_k}
        try:
            telemetry.make_ready(folder, named, SUFFIX)
            file = MappedFile(folder, SUFFIX, MAGIC, {**header, **sizes}, layout.length)
        except OSError as error:
            logger.warning(
                "expert cache: routing is not recorded (%s); set EXPERT_CACHE_TRACE to a folder "
                "that can be written. The cache itself is not affected.", error,
            )  # fmt: skip
            return None
        memory = allocator.view(file)
        if memory is None:
            file.path.unlink(missing_ok=True)
            return None
        logger.info(
            "expert cache: the routing of the last %d tokens is in %s", layout.tokens, file.path
        )
        return Ring(file, layout, memory)

    recorder = Recorder(len(layers), open_ring)
    for number, layer in enumerate(layers):
        layer.cache.record = functools.partial(recorder.record, number)
    return recorder
