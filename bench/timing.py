"""Times of device work: CUDA graphs, events, and the median of many runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .report import Spread

Work = Callable[[], None]


def captured(work: Work) -> Work:
    """`work` as one replay of a CUDA graph; itself where there is no GPU."""
    if not torch.cuda.is_available():
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # loads modules, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        graph.replay()

    replay.keeps = work  # a graph holds addresses only: the tensors must live as long
    return replay


def milliseconds(work: Work, repeats: int = 20, warm: int = 3) -> Spread:
    """Device time of `work` on the current stream, each run waited for."""
    for _ in range(warm):
        work()
    return Spread.of([_once(work) for _ in range(repeats)])


def _once(work: Work) -> float:
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def stream_handle(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class GraphClock:
    """Device time of every replay of a CUDA graph in this process, by events around it.

    A decode step of vLLM is one replay. Unlike the time of the step, this leaves out what the
    host does between two steps, which is much of a short one and differs from run to run.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if not torch.cuda.is_available():
            return
        original, pairs = torch.cuda.CUDAGraph.replay, self._pairs

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            original(graph)
            end.record()
            pairs.append((start, end))

        torch.cuda.CUDAGraph.replay = replay

    def take(self) -> list[float]:
        """Milliseconds of each replay since the last call; the device must be idle."""
        times = [start.elapsed_time(end) for start, end in self._pairs]
        self._pairs.clear()
        return times
