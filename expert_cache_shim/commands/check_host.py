"""Settings, host memory, and the folder of the counters."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..settings import VARIABLES, Settings, SettingsError
from ..untrusted import own_folder
from .check import Check, size
from .machine import cgroup_memory_limit, filesystem_of, locked_memory_limit, memory_total

LITTLE_SHARED = 2**30
MORE_SHARED = "docker run --shm-size 8g, or --ipc host"
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}


def check_settings() -> list[Check]:
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        return [Check("settings", "fail", str(error), "correct it; the cache is off until then")]
    values = [
        f"{variable.name}={getattr(settings, variable.field)}"
        for variable in VARIABLES
        if getattr(settings, variable.field) != getattr(Settings, variable.field)
    ]
    found = ", ".join(values) or "defaults"
    warnings = [Check("settings", "warn", *_split(text)) for text in settings.unknown]
    return [Check("settings", "ok", found), *warnings]


def check_memory() -> Check:
    total, available = memory_total()
    limit = cgroup_memory_limit()
    text = f"{size(total)} of RAM, {size(available)} of it available"
    if limit is None or limit >= total:
        return Check("host memory", "ok", text)
    return Check(
        "host memory", "warn", f"{text}, but this container may have {size(limit)}",
        "raise its limit (docker run --memory) if the experts and vLLM do not fit",
    )  # fmt: skip


def check_pinned_memory(link: dict | None) -> Check:
    """`link`: what the step "link" said, which pins memory; None without a GPU."""
    limit = locked_memory_limit()
    if limit is None:
        return Check("pinned memory", "ok", "no limit (ulimit -l)")
    text = f"ulimit -l is {size(limit)}"
    if link and "error" not in link:
        pinned = f"which the driver does not apply: it pinned {size(link['bytes'])}"
        return Check("pinned memory", "ok", f"{text}, {pinned}")
    return Check(
        "pinned memory", "warn", f"{text}; a driver that applies it cannot pin the experts",
        "`ulimit -l unlimited`, or docker run --ulimit memlock=-1",
    )  # fmt: skip


def check_shared_memory(folder: str = "/dev/shm") -> Check:
    """Ranks of one engine exchange messages in it, and containers give it 64 MiB."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return Check("shared memory", "warn", f"{folder}: {error.strerror}", MORE_SHARED)
    text = f"{folder} has {size(found.f_frsize * found.f_blocks)}"
    if found.f_frsize * found.f_blocks < LITTLE_SHARED:
        return Check("shared memory", "warn", f"{text}, too little for several GPUs", MORE_SHARED)
    return Check("shared memory", "ok", text)


def check_counters(setting: str | None) -> Check:
    """Writes a snapshot as a worker would, where it would, and removes it."""
    if setting == "off":
        return Check("counters", "ok", "switched off (EXPERT_CACHE_SNAPSHOT=off)")
    remedy = "set EXPERT_CACHE_SNAPSHOT to a folder in memory that can be written, or to off"
    try:
        from .. import telemetry
    except ImportError as error:
        return Check("counters", "warn", f"not tried: {error}", "install numpy")
    folder = telemetry.folder_of(setting)
    made = _missing_folders(folder)
    try:
        if not setting:
            own_folder(folder)
        snapshot = telemetry.SnapshotFile(folder, "doctor", 0, [])
        snapshot.path.unlink()
        kind = filesystem_of(folder)
    except OSError as error:
        return Check("counters", "warn", f"{folder}: {error.strerror or error}", remedy)
    finally:
        for new in made:
            with contextlib.suppress(OSError):  # a worker that starts just now may use it
                new.rmdir()
    if kind not in IN_MEMORY:
        found = f"{folder}: can be written, but is on {kind}, which a GPU may not map"
        return Check("counters", "warn", found, remedy)
    return Check("counters", "ok", f"{folder}: can be written, in memory ({kind})")


def _missing_folders(folder: Path) -> list[Path]:
    """Those that would have to be made for it, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _split(warning: str) -> tuple[str, str]:
    """Finding and remedy in a warning of `settings`."""
    found, _, remedy = warning.partition(": ")
    return found, remedy
