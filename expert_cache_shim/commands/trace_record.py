"""`trace record`: takes the routing of a running server."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from . import CommandError, Option
from .trace import need, save, writable
from .trace_import import Output

if TYPE_CHECKING:
    from ..trace_ring import Reader, Rows

INTERVAL = 0.1  # seconds between two looks at the ring


def record(
    output: Output,
    seconds: Annotated[
        float | None,
        Option(
            "--seconds",
            "Stop after so long; 0 takes what was kept and ends. Unset: until Ctrl-C, or until "
            "the server ends.",
            "S",
        ),
    ] = None,
    tokens: Annotated[int, Option("--tokens", "Stop after so many tokens.", "N")] = 0,
    pid: Annotated[int, Option("--pid", "The worker, where several are there.", "PID")] = 0,
    folder: Annotated[
        str | None,
        Option(
            "--folder",
            "The folder that EXPERT_CACHE_TRACE names for the server. Unset: the same variable "
            "here, else the one that 'on' chooses.",
        ),
    ] = None,
) -> int:
    """Record the routing of a server that was started with EXPERT_CACHE_TRACE=on."""
    need("numpy", "rich")
    path = writable(output)
    if seconds is not None and not seconds >= 0:
        raise CommandError(f"--seconds {seconds}: allowed is 0 or more")
    ring = _ring(folder, pid)
    taken = _follow(ring, math.inf if seconds is None else seconds, tokens or math.inf)
    from .. import trace, trace_ring

    count = sum(len(rows.ids) for rows in taken)
    if not count:
        raise CommandError(f"no token was run meanwhile by {ring.model}; nothing is written")
    try:
        found = trace_ring.to_trace(ring.header, taken)
    except trace.TraceError as error:
        raise CommandError(f"{ring.path}: damaged: {error}") from None
    save(found, path)
    lost = found.meta["lost_tokens"]
    print(f"wrote {output}: {count:,} tokens in {found.steps:,} forward passes")
    if lost:
        print(
            f"{lost:,} tokens are missing: the server ran more than the {ring.layout.tokens:,} "
            "that are kept between two looks. What was recorded before and after is joined."
        )
    return 0


def _ring(folder: str | None, pid: int) -> Reader:
    """The ring of the worker that is meant: of those that run, or else of the last that did."""
    from ..telemetry import files_of, folder_of
    from ..trace_ring import SUFFIX, Reader, RingError

    setting = folder or os.environ.get("EXPERT_CACHE_TRACE", "").strip()
    place = folder_of(None if setting.lower() in ("", "on", "off") else setting)
    rings = []
    for path in files_of(place, SUFFIX):
        try:
            rings.append(Reader(path))
        except (RingError, OSError):
            continue
    found = [ring for ring in rings if ring.pid == pid] if pid else rings
    if not found:
        raise CommandError(
            f"{place}: no {'such ' if pid else ''}worker keeps its routing there; start the "
            "server with EXPERT_CACHE_TRACE=on, or name its folder with --folder"
        )
    running = [ring for ring in found if ring.is_alive()]
    found = running or [max(found, key=lambda ring: ring.header["started"])]
    rank = min(ring.header["rank"] for ring in found)
    first = [ring for ring in found if ring.header["rank"] == rank]
    if len(first) > 1:
        names = ", ".join(f"{ring.pid} ({ring.model}, rank {rank})" for ring in first)
        raise CommandError(f"several workers keep their routing: choose one by --pid: {names}")
    return first[0]


def _follow(ring: Reader, seconds: float, tokens: float) -> list[Rows]:
    """What the ring holds and what comes, with a counter on the terminal; no more than a trace
    may have."""
    from rich.console import Console
    from rich.status import Status

    from ..trace import MAX_BYTES

    layout = ring.layout
    most = MAX_BYTES // (2 * layout.layers * layout.top_k) - layout.tokens
    tokens = min(tokens, max(1, most))
    taken: list[Rows] = []
    begin = time.monotonic()

    def take() -> int:
        rows = ring.read()
        if rows.reset:
            taken.clear()
        taken.append(rows)
        return sum(len(rows.ids) for rows in taken)

    with Status("", console=Console(stderr=True)) as status:
        _until_interrupted(lambda: _step(ring, take, status, begin + seconds, tokens))
    return taken


def _step(ring: Reader, take: Callable[[], int], status, deadline: float, tokens: float) -> bool:
    """One look; whether it was the last."""
    alive = ring.is_alive()
    try:
        count = take()
    except OSError as error:
        print(f"{ring.path}: {error.strerror}; what was recorded before is kept", file=sys.stderr)
        return True
    status.update(f"{ring.model}: {count:,} tokens; Ctrl-C ends")
    if not alive or count >= tokens or time.monotonic() >= deadline:
        return True
    time.sleep(INTERVAL)
    return False


def _until_interrupted(step: Callable[[], bool]) -> None:
    try:
        while not step():
            pass
    except KeyboardInterrupt:
        pass
