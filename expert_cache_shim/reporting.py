"""What the log says of a cache: what was armed, and from then on how it does.

Everything that is said of a running cache is read from its snapshot file, so that no line costs
a call into the GPU runtime, and no step waits for one.
"""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from . import vllm_compat
from .log import logger
from .refusals import OFFLOAD, RESIDENT, Refusal
from .telemetry import Snapshot, SnapshotError, SnapshotFile, read_snapshot

if TYPE_CHECKING:
    from .arming import Report


# --- When a model has loaded ----------------------------------------------------------------


def log_report(report: Report) -> None:
    """One line for what is armed, one for each reason why a layer is not."""
    total = len(report.armed) + len(report.refused)
    if report.storage_note:
        logger.warning("expert cache: %s", report.storage_note)
    if report.armed:
        logger.info("expert cache: %s", _armed_line(report, total))
        _warn_if_one_token_is_too_wide(report)
    for reason, names in _by_reason(report.refused).items():
        logger.warning(
            "expert cache: %d of %d MoE layers of %s not armed (%s): %s",
            len(names), total, report.model, first_of(names), reason,
        )  # fmt: skip
    if report.refused and all(refusal.reason == RESIDENT for _, refusal in report.refused):
        cause = "" if report.armed else _why_nothing_was_offloaded(vllm_compat.offloading())
        if cause:
            logger.warning("expert cache: no expert of %s was offloaded: %s", report.model, cause)


def log_given_back(model: str, refused: list[tuple[str, Refusal]]) -> None:
    """One line for each reason why layers that were served through the cache are so no longer."""
    for reason, names in _by_reason(refused).items():
        logger.warning(
            "expert cache: %d MoE layers of %s are no longer armed (%s): %s",
            len(names), model, first_of(names), reason,
        )  # fmt: skip


def _by_reason(refused: list[tuple[str, Refusal]]) -> dict[str, list[str]]:
    """Names of layers, by the reason with its remedy."""
    reasons: dict[str, list[str]] = {}
    for name, refusal in refused:
        reasons.setdefault(str(refusal), []).append(name)
    return reasons


def _armed_line(report: Report, total: int) -> str:
    caches = [layer.cache for layer in report.armed]
    slots = sorted({cache.slots for cache in caches})
    experts = sorted({cache.experts for cache in caches})
    storage = "/".join(sorted({cache.storage.kind for cache in caches})) + " storage"
    if any(layer.preloads for layer in report.armed):
        storage += " with preload"
    host = sum(c.experts * layer.record_bytes for c, layer in zip(caches, report.armed))
    return (
        f"{len(caches)} of {total} MoE layers of {report.model} armed: "
        f"{_span(slots)} of {_span(experts)} experts resident in each, {caches[0].policy_name}, "
        f"{storage}, "
        f"{_mib(sum(c.storage.private for c in caches))} of device memory for slots and "
        f"{_mib(sum(c.storage.shared for c in caches))} shared, "
        f"{_mib(host)} of experts on the host"
    )


def _warn_if_one_token_is_too_wide(report: Report) -> None:
    too_few = [layer for layer in report.armed if layer.cache.slots < layer.top_k]
    if too_few:
        logger.warning(
            "expert cache: one token routes to %d experts of a layer, more than its %d slots "
            "(%s), so every step fetches experts that cannot stay; raise EXPERT_CACHE_SLOTS, GIB "
            "or FRACTION",
            too_few[0].top_k, too_few[0].cache.slots, first_of([layer.name for layer in too_few]),
        )  # fmt: skip


def _why_nothing_was_offloaded(asked: vllm_compat.Offloading) -> str:
    """The cause and its remedy where offloading was asked for; "" where it was not."""
    if asked.gib == 0:
        if not asked.params:
            return ""
        return f"--cpu-offload-params without --cpu-offload-gb offloads nothing; {OFFLOAD}"
    if asked.offloader != "UVAOffloader":
        return (
            f"--cpu-offload-gb {asked.gib:g} was asked for, but the offloader at work is "
            f"{asked.offloader}; vLLM before 0.28 ignores the option in its second model runner: "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if asked.offloaded_bytes == 0:
        return (
            f"--cpu-offload-params {' '.join(sorted(asked.params)) or '(none)'} matches no weight "
            f"of this model; {OFFLOAD}"
        )
    return (
        f"{_mib(asked.offloaded_bytes)} of other weights were; {OFFLOAD}, and see "
        "docs/troubleshooting.md for kernels that bring weights back"
    )


# --- While it serves ------------------------------------------------------------------------


def log_regularly(snapshot: SnapshotFile | None, interval: float) -> threading.Thread | None:
    """Logs a line every `interval` seconds in which the model was used, 0: never.

    The thread ends when the snapshot's owner, the armed model, has gone. It is a daemon: it
    keeps no process alive. A process that is forked off later has no such thread, as it should:
    it has the memory of this model, but does not serve it.
    """
    if snapshot is None or interval == 0:
        return None
    thread = threading.Thread(
        target=_log_while_in_use, args=(weakref.ref(snapshot), snapshot.path, interval),
        name="expert-cache-log", daemon=True,
    )  # fmt: skip
    thread.start()
    return thread


def _log_while_in_use(
    owner: weakref.ref[SnapshotFile], path: Path, interval: float, wait=time.sleep
) -> None:
    try:
        before, read_at = read_snapshot(path), time.monotonic()
        warned = False
        while True:
            wait(interval)
            if owner() is None:
                return
            now, moment = read_snapshot(path), time.monotonic()
            counted = now.since(before)
            if counted.layer_steps():
                logger.info("expert cache: %s", activity_line(counted, moment - read_at))
                warned = warned or _warn_if_steps_are_too_wide(counted)
            before, read_at = now, moment
    except (OSError, SnapshotError) as error:
        logger.info("expert cache: no more lines about %s, its counters are gone: %s", path, error)
    except Exception:
        logger.exception("expert cache: unexpected error; serving goes on")


def activity_line(counted: Snapshot, seconds: float) -> str:
    """What was counted in so many seconds."""
    routed = counted.total("hits") + counted.total("misses")
    told = (
        f"{counted.model}, rank {counted.rank}: in {seconds:.0f} s "
        f"{percent(counted.hit_rate())} of {routed:,} routed experts were resident, "
        f"{counted.fetched_bytes() / 2**30 / seconds:.2f} GiB/s fetched, "
        f"{percent(counted.overflow_share())} of the misses found no slot, "
        f"{percent(counted.read_through_share())} of the layer-steps were read through"
    )
    given_back = int(counted.given_back.sum())
    if given_back:
        told += f"; {given_back} of {len(counted.layers)} layers are on vLLM's own path again"
    return told


def _warn_if_steps_are_too_wide(counted: Snapshot) -> bool:
    armed, width = counted.armed_layers, counted.width() or 0
    slots = max((layer["slots"] for layer in armed), default=0)
    if not armed or width <= slots:
        return False
    logger.warning(
        "expert cache: a step of %s routes to %s experts of a layer on average, more than its %d "
        "slots, so part of every step is fetched again; raise EXPERT_CACHE_SLOTS, GIB or "
        "FRACTION, or lower --max-num-seqs", counted.model, f"{width:.1f}", slots,
    )  # fmt: skip
    return True


# --- Words ----------------------------------------------------------------------------------


def percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _mib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
