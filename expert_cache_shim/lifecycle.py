"""What the worker does around a cache: warm-up, other weights, sleep, and the first real steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import wrapt

from . import vllm_compat
from .log import logger

if TYPE_CHECKING:
    from .arming import Report


# Model executions after which every armed layer must have been called. More than one: the
# counters of the last may still be on their way.
EXECUTIONS = 8
# Free device memory after warm-up below which the next allocation of anybody may not fit.
NEARLY_FULL = 256 * 2**20


def watch(worker: type) -> None:
    """Wraps the worker class's own methods that warm up, execute, or change weights; inherited
    ones are wrapped where they are defined."""
    _wrap(worker, vllm_compat.WARM_UP, _after_warm_up)
    _wrap(worker, vllm_compat.EXECUTE, _around_execution)
    _wrap(worker, vllm_compat.WAKE_UP, _after_wake_up)
    for name in vllm_compat.WEIGHTS_CHANGING:
        _wrap(worker, name, _after_part_of_a_change)
    for name in vllm_compat.WEIGHTS_CHANGED:
        _wrap(worker, name, _after_change)


def watch_model(model: type) -> None:
    """Wraps `load_weights` of a model's class where it is defined: code that feeds a model
    weights while it serves calls it without the worker's knowledge."""
    for owner in model.__mro__:
        if vllm_compat.LOAD_WEIGHTS in vars(owner):
            _wrap(owner, vllm_compat.LOAD_WEIGHTS, _around_load_weights)
            return


def weights_changed() -> None:
    """For code that writes into the parameters of a served model by itself: the next steps use
    what it wrote. Call it in the worker's process."""
    _forget(None)


def _wrap(owner: type, name: str, wrapper: Any) -> None:
    method = vars(owner).get(name)
    if method is not None and getattr(method, "_self_wrapper", None) is not wrapper:
        setattr(owner, name, wrapt.FunctionWrapper(method, wrapper))


def _after_warm_up(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Warm-up routes dummy tokens: what they left in the cache and its counters is no use."""
    result = wrapped(*args, **kwargs)
    _guarded(lambda: _forget(instance))
    _guarded(lambda: _reset_counters(instance))
    _guarded(warn_if_device_is_full)
    return result


def _after_part_of_a_change(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Host copies hold other bytes, also where an error came half way. A layer may lie in
    pieces until the change is finished, so nothing of it is looked at."""
    try:
        return wrapped(*args, **kwargs)
    finally:
        _guarded(lambda: _forget(instance))


def _after_change(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Host copies hold other bytes, and a layer may have another kernel."""
    result = _after_part_of_a_change(wrapped, instance, args, kwargs)
    _guarded(lambda: _refresh(instance))
    return result


def _after_wake_up(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    """What lies in device memory may be gone. Not looked at where waking failed: it may not be
    mapped."""
    result = wrapped(*args, **kwargs)
    if vllm_compat.wakes_weights(args[0] if args else kwargs.get("tags")):
        _guarded(lambda: _refresh(instance))
    return result


# Models that were given weights since the last execution. Emptied before the next one and not at
# once: a trainer's weights may come one by one, in tens of thousands of calls.
_given_weights: weakref.WeakSet[Any] = weakref.WeakSet()


def _around_load_weights(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        _given_weights.add(instance)


_executions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by worker


def _around_execution(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    if _given_weights:
        _guarded(_forget_given)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _guarded(lambda: _end_preloads(instance))
    _guarded(lambda: _count_execution(instance))
    return result


def _end_preloads(worker: Any) -> None:
    """A pass may end before the layer that was fetched for: by an error, or because vLLM does not
    run that layer then. Another engine of the process may be in the middle of its own."""
    from . import arming

    report = arming.report_of(vllm_compat.model_of(worker))
    if report is not None:
        report.end_preloads()


def _count_execution(worker: Any) -> None:
    """After a worker's first executions asks once whether its cache was called."""
    executions = _executions.get(worker, 0)
    if executions < EXECUTIONS:
        _executions[worker] = executions + 1
        if executions + 1 == EXECUTIONS:
            report_uncalled(worker)


def _forget_given() -> None:
    from . import arming

    while _given_weights:
        for layer in arming.layers_of(_given_weights.pop()):
            _guarded(layer.cache.forget)


def _guarded(action: Any) -> None:
    """An error of ours must not end a worker."""
    try:
        action()
    except Exception:
        logger.exception("expert cache: unexpected error; serving goes on")


def _reports(worker: Any) -> list[Report]:
    """Of the worker's own model, for another engine of this process may be in the middle of a
    step; of every model where there is no telling."""
    from . import arming

    own = arming.report_of(vllm_compat.model_of(worker))
    return list(arming.reports()) if own is None else [own]


def _forget(worker: Any) -> None:
    for report in _reports(worker):
        _guarded(report.end_preloads)
        for layer in report.armed:
            _guarded(layer.cache.forget)
        for recorder in report.recorders:
            _guarded(recorder.reset)


def _reset_counters(worker: Any) -> None:
    for report in _reports(worker):
        for layer in report.armed:
            layer.cache.reset_counters()


def warn_if_device_is_full() -> None:
    """When all is allocated, slots and KV cache. Windows' driver, under WSL too, does not refuse
    what does not fit: it moves memory to the host, and everything is slow without an error."""
    import torch

    from . import arming

    devices = {layer.cache.device for report in arming.reports() for layer in report.armed}
    for device in (device for device in devices if device.type == "cuda"):
        free, total = torch.cuda.mem_get_info(device)
        if free < NEARLY_FULL:
            logger.warning(
                "expert cache: %d MiB of the %d MiB of %s are free: allocations may fail, or "
                "spill to host memory where the driver allows it (WSL); lower "
                "--gpu-memory-utilization, or the number of slots",
                free >> 20, total >> 20, device,
            )  # fmt: skip


def _refresh(worker: Any) -> None:
    from . import arming

    arming.refresh(_reports(worker))


def report_uncalled(worker: Any = None) -> list[str]:
    """Says loudly which armed models, or layers of them, never reached the cache; returns the
    names of the models of which no layer did."""
    from .reporting import first_of

    silent = []
    for report in _reports(worker):
        if report.armed and report.steps() == 0:
            silent.append(report.model)
            continue
        uncalled = [layer.name for layer in report.armed if layer.cache.calls() == 0]
        if uncalled:
            logger.warning(
                "expert cache: %d of %d armed layers of %s were never called (%s): vLLM does not "
                "run them, or not through apply(). Their slots take device memory for nothing.",
                len(uncalled), len(report.armed), report.model, first_of(uncalled),
            )  # fmt: skip
    for model in silent:
        logger.warning(
            "expert cache: armed on %s, but no step has reached it: this vLLM runs the experts "
            "on a path that does not call the layer's apply() (a model-specific kernel, or a "
            "graph compiled without the cache). Output is right; nothing is gained.", model,
        )  # fmt: skip
    return silent
