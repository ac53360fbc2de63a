"""What a handler that keeps records keeps: text."""

from __future__ import annotations

import gc
import weakref

from expert_cache_shim.log import logger


class Memory:
    """Stands for what a failing frame holds."""


def fail(held: list) -> None:
    memory = Memory()
    held.append(weakref.ref(memory))
    raise OSError(24, "Too many open files")


def test_a_kept_record_holds_no_frame_of_the_error(caplog):
    held: list[weakref.ref] = []
    try:
        fail(held)
    except OSError as error:
        logger.exception("layer %s", "layers.1")
        logger.warning("no snapshot (%s)", error)
    gc.collect()
    assert held[0]() is None
    assert "layer layers.1\nTraceback (most recent call last):" in caplog.text
    assert 'raise OSError(24, "Too many open files")' in caplog.text
    assert caplog.messages == ["layer layers.1", "no snapshot ([Errno 24] Too many open files)"]
