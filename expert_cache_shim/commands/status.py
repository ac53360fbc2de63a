"""`status`: what the caches of this machine do, read from the counters that workers leave."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from . import CommandError, Option

if TYPE_CHECKING:
    from ..telemetry import Snapshot
    from .watch import Rank, Reading, Watch

# Eight steps, from the worst hit rate of a strip to all hits.
BLOCKS = "▁▂▃▄▅▆▇█"


def status(
    folder: Annotated[
        str | None,
        Option(
            "--folder",
            "Where the counters lie: EXPERT_CACHE_SNAPSHOT of the server. Unset: that of this "
            "shell, else the default folder.",
            "PATH",
        ),
    ] = None,
    once: Annotated[bool, Option("--once", "Print once, as a pipe gets it, and end.")] = False,
    interval: Annotated[
        float | None,
        Option(
            "--interval",
            "Seconds between two readings. Live: 1 unless given. Once: read twice, and print what "
            "happened in between, too.",
            "SECONDS",
        ),
    ] = None,
    ended: Annotated[
        bool, Option("--ended", "Also the last counters of workers that have ended.")
    ] = False,
    as_json: Annotated[bool, Option("--json", "Print once, everything, as JSON.")] = False,
) -> int:
    """Show what the caches of running servers do; status 1 if none runs."""
    if interval is not None and not 0.1 <= interval <= 86400:
        raise CommandError(f"--interval {interval:g}: allowed is a number from 0.1 to 86400")
    watch = _watch(folder)
    live = sys.stdout.isatty() and not (once or as_json)
    if live and _rich_is_there():
        from .status_screen import show

        return show(watch, interval or 1.0, ended)
    reading = watch.read()
    if interval and reading.engines:
        time.sleep(interval)
        reading = watch.read()
    if as_json:
        print(json.dumps(as_data(reading), indent=2))
    else:
        print("\n".join(_plain(reading, ended)).rstrip())
    return 0 if reading.engines else 1


def _watch(folder: str | None) -> Watch:
    setting = folder or os.environ.get("EXPERT_CACHE_SNAPSHOT", "").strip() or None
    if setting is not None and setting.lower() == "off":
        raise CommandError(
            "EXPERT_CACHE_SNAPSHOT is off, so no counters are kept; name the folder of a server "
            "that keeps some with --folder"
        )
    try:
        from ..telemetry import folder_of
        from .watch import Watch
    except ImportError as error:
        raise CommandError(f"counters cannot be read ({error}): use vLLM's Python") from None
    return Watch(folder_of(setting))


def _rich_is_there() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        print("pip install 'expert-cache-shim[tools]' brings the live view", file=sys.stderr)
        return False
    return True


# --- Words ----------------------------------------------------------------------------------


def none_runs(reading: Reading) -> str:
    lines = [
        f"no cache is running that keeps its counters in {reading.folder}",
        "-> for a server with EXPERT_CACHE_SNAPSHOT set, or of another user: --folder PATH; for "
        "one in a container: run this inside",
        "-> a server without an armed layer keeps none: its log gives the reason",
    ]
    if reading.ended:
        lines.append(f"-> --ended shows the last counters of {len(reading.ended)} ended workers")
    return "\n".join(lines)


COLUMNS = ("rank", "pid", "layers", "slots", "hit rate", "fetched", "overflow", "read through")
RECENT_COLUMNS = ("hit rate now", "fetched now", "steps/s")


def cells(now: Snapshot) -> list[str]:
    """A row of COLUMNS: sums since warm-up."""
    return [
        str(now.rank), str(now.pid), layers_of(now), slots_of(now), percent(now.hit_rate()),
        size(now.fetched_bytes()), percent(now.overflow_share()), percent(now.read_through_share()),
    ]  # fmt: skip


def recent_cells(rank: Rank) -> list[str]:
    """A row of RECENT_COLUMNS: what happened since the reading before."""
    if rank.recent is None:
        return [""] * len(RECENT_COLUMNS)
    return [
        percent(rank.recent.hit_rate()),
        f"{size(rank.bytes_per_second())}/s",
        f"{rank.passes_per_second():,.1f}",
    ]


def layers_of(snapshot: Snapshot) -> str:
    """How many are armed, and of how many where some were given back."""
    armed, total = len(snapshot.armed_layers), len(snapshot.layers)
    return str(total) if armed == total else f"{armed} of {total}"


def slots_of(snapshot: Snapshot) -> str:
    pairs = {(layer["slots"], layer["experts"]) for layer in snapshot.armed_layers}
    return ", ".join(f"{slots} of {experts}" for slots, experts in sorted(pairs))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def size(count: float) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**20:.1f} MiB"


def layer_number(name: str) -> str:
    """As short as a layer can be named: 3 for model.layers.3.mlp.experts."""
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else name


def strip_scale(rates: list[float | None]) -> float:
    """The hit rate that the lowest block of a strip stands for: a multiple of 10 %, below 1."""
    tenths = [math.floor(rate * 10) for rate in rates if rate is not None]
    return min([*tenths, 9]) / 10


def block(rate: float | None, lowest: float) -> str:
    if rate is None:
        return "·"
    place = (rate - lowest) / (1 - lowest)
    return BLOCKS[min(len(BLOCKS) - 1, int(place * len(BLOCKS)))]


def _plain(reading: Reading, with_ended: bool) -> Iterator[str]:
    if not reading.engines:
        yield none_runs(reading)
        yield ""
    for engine in reading.engines:
        first = engine.ranks[0]
        recent = first.recent is not None
        yield f"{engine.model}  ({first.now.policy})"
        rows = [[*COLUMNS, *(RECENT_COLUMNS if recent else ())]]
        rows += [cells(rank.now) + (recent_cells(rank) if recent else []) for rank in engine.ranks]
        yield from _aligned(rows)
        rates = engine.layer_hit_rates()
        lowest = strip_scale(list(rates.values()))
        blocks = "".join(block(rate, lowest) for rate in rates.values())
        yield f"hit rate by layer, {lowest:.0%} {BLOCKS} 100%: {blocks}"
        yield ""
    if with_ended and reading.ended:
        yield "ended"
        rows = [["started", "model", *COLUMNS]]
        rows += [
            [when(snapshot.started), snapshot.model, *cells(snapshot)] for snapshot in reading.ended
        ]
        yield from _aligned(rows)


def when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()


# --- Data -----------------------------------------------------------------------------------


def as_data(reading: Reading) -> dict[str, Any]:
    """Everything, for scripts. Rates are None where there is nothing to divide by."""
    return {
        "folder": str(reading.folder),
        "engines": [
            {"model": engine.model, "ranks": [_rank_data(rank) for rank in engine.ranks]}
            for engine in reading.engines
        ],
        "ended": [_worker_data(snapshot) for snapshot in reading.ended],
    }


def _rank_data(rank: Rank) -> dict[str, Any]:
    data = _worker_data(rank.now)
    if rank.recent is not None:
        data["interval"] = {"seconds": rank.seconds, **_counted(rank.recent)}
    return data


def _worker_data(snapshot: Snapshot) -> dict[str, Any]:
    from ..policy import COUNTERS

    rates = snapshot.layer_hit_rates()
    return {
        "model": snapshot.model,
        "rank": snapshot.rank,
        "pid": snapshot.pid,
        "started": snapshot.started,
        "policy": snapshot.policy,
        **_counted(snapshot),
        "layers": [
            {**layer, "given_back": gone, "counters": dict(zip(COUNTERS, counts)), "hit_rate": rate}
            for layer, gone, counts, rate in zip(
                snapshot.layers, snapshot.given_back.tolist(), snapshot.counters.tolist(), rates
            )
        ],
    }


def _counted(snapshot: Snapshot) -> dict[str, Any]:
    from ..policy import COUNTERS

    return {
        "counters": {name: snapshot.total(name) for name in COUNTERS},
        "fetched_bytes": snapshot.fetched_bytes(),
        "hit_rate": snapshot.hit_rate(),
        "overflow_share": snapshot.overflow_share(),
        "read_through_share": snapshot.read_through_share(),
    }
