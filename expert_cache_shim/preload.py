"""Fetches the next layer's experts while one layer computes.

A step of many tokens routes to nearly every expert, so what the next layer will miss is known
before its router has run: every expert that has no slot. They are laid in overflow rows and
copied on a stream of their own. Two layers in a row have overflow rows of different memory, so
the copies do not disturb the layer that computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .log import logger
from .native import KernelError

if TYPE_CHECKING:
    from .layer import ExpertCache


# Routing ids for each expert from which on a step counts as one that routes to nearly all: an
# expert that nobody is routed to has then been fetched for nothing.
IDS_PER_EXPERT = 32


class Preloader:
    """What the layers of one model share: a stream, and the one layer that is under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: ExpertCache | None = None
        self._works = True
        if device.type == "cuda":
            # In front of the kernels that compute: they would leave it no place.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._done = torch.cuda.Event()

    def start(self, cache: ExpertCache, ids: torch.Tensor) -> None:
        """Begins with a layer's experts, if a step with `ids` is worth it. To be called when the
        step of the layer before has been fetched and not yet computed."""
        enough = IDS_PER_EXPERT * cache.experts_of_all_ranks
        if not self._works or ids.numel() < enough or self._is_captured():
            return
        try:
            self._enqueue(cache)
        except KernelError as error:
            self._works = False
            logger.error(
                "expert cache: experts are no longer fetched ahead, because a kernel could not "
                "be launched: %s", error,
            )  # fmt: skip
        else:
            self._pending = cache

    def _enqueue(self, cache: ExpertCache) -> None:
        if self._device.type != "cuda":
            cache.preload(stream=0)
            return
        # After what is enqueued so far: the layer's own last step, and the last reader of the
        # overflow rows it shares.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            cache.preload(self._stream.cuda_stream)
        finally:
            self._done.record(self._stream)

    def finish(self, cache: ExpertCache | None) -> bool:
        """Whether the overflow rows hold this layer's experts, for a step that is enqueued now.

        Whatever is under way ends before that step: a layer that was not called after all may
        share its overflow rows.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        if self._is_captured():
            return False
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return pending is cache

    def end(self) -> None:
        """What is enqueued from now on finds nothing under way: a graph that is replayed waits
        for nothing, and a layer that was preloaded may have been overtaken by it."""
        self.finish(None)

    def _is_captured(self) -> bool:
        """A graph would repeat this for every batch of its size, and wait for an event of now."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
