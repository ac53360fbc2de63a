"""The shim's logger, a child of vLLM's, which shows it.

A record names an error by its text alone: an error holds its frames, and they hold tensors. A
handler that keeps records would keep a model's device memory with them. Its message is one line
that steers no terminal, whatever a path or the name of a model has in it.
"""

from __future__ import annotations

import logging

from .untrusted import printable

logger = logging.getLogger("vllm.expert_cache")

_formatter = logging.Formatter()


def _hold_text_only(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    if record.exc_info:
        record.exc_text = record.exc_text or _formatter.formatException(record.exc_info)
        record.exc_info = None
    return True


logger.addFilter(_hold_text_only)
