"""Several replays at the same time, one process for each core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from .trace import Trace
from .trace_replay import Counts, Replay

_EVERY = 64  # steps between two notes of progress
_done: Any = None  # in a worker: the shared number of steps done


@dataclass(frozen=True)
class Job:
    """The arguments of a `Replay`."""

    trace: Trace
    slots: tuple[int, ...]
    policy: str
    decay: int | None = None


def run_all(jobs: Sequence[Job], progress: Callable[[int], None]) -> list[Counts]:
    """The counts of every job, in order. `progress` is told now and then how many steps all of
    them have done together, the last time with all."""
    # Not by fork: a caller may show progress from a thread.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, context, _set_done, (done,)) as pool:
        futures = [pool.submit(_run, job) for job in jobs]
        while wait(futures, timeout=0.1).not_done:
            progress(done.value)
        counts = [future.result() for future in futures]
    progress(sum(job.trace.steps for job in jobs))
    return counts


def _set_done(value: Any) -> None:
    global _done
    _done = value


def _run(job: Job) -> Counts:
    replay = Replay(job.trace, job.slots, job.policy, job.decay)
    for number in replay:
        if number % _EVERY == _EVERY - 1:
            with _done.get_lock():
                _done.value += _EVERY
    return replay.counts
