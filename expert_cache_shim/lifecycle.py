"""What the worker does around a cache: warm-up, and the first real steps."""

from __future__ import annotations

import logging
from typing import Any

import wrapt

from . import vllm_compat

logger = logging.getLogger("vllm.expert_cache")

# Model executions after which every armed layer must have been called. More than one: the
# counters of the last may still be on their way.
EXECUTIONS = 8


def watch(worker: type) -> None:
    """Wraps the worker class's own warm-up and execute methods; inherited ones are wrapped
    where they are defined."""
    for name, wrapper in ((vllm_compat.WARM_UP, _after_warm_up), (vllm_compat.EXECUTE, None)):
        method = vars(worker).get(name)
        if method is None or isinstance(method, wrapt.FunctionWrapper):
            continue
        wrapper = wrapper or _FirstSteps(worker, method)
        setattr(worker, name, wrapt.FunctionWrapper(method, wrapper))


def _after_warm_up(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Warm-up routes dummy tokens: what they left in the cache and its counters is no use."""
    from . import arming

    result = wrapped(*args, **kwargs)
    for report in arming.reports():
        for layer in report.armed:
            layer.cache.forget()
    return result


class _FirstSteps:
    """Counts the first executions of the model, then asks whether the cache was called."""

    def __init__(self, worker: type, original: Any) -> None:
        self._worker = worker
        self._original = original
        self._left = EXECUTIONS

    def __call__(self, wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        self._left -= 1
        if self._left == 0:
            setattr(self._worker, vllm_compat.EXECUTE, self._original)
            report_uncalled()
        return result


def report_uncalled() -> list[str]:
    """Says loudly which armed models never reached the cache; returns their names."""
    from . import arming

    silent = [report.model for report in arming.reports() if report.steps() == 0]
    for model in silent:
        logger.warning(
            "expert cache: armed on %s, but no step has reached it: this vLLM runs the experts "
            "on a path that does not call the layer's apply() (a model-specific kernel, or a "
            "graph compiled without the cache). Output is right; nothing is gained. On a CPU "
            "serve with --enforce-eager.", model,
        )  # fmt: skip
    return silent
