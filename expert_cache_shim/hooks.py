"""The wrapt hooks: what is rebound when vLLM's modules are imported.

`process_weights_around_loading` is imported by name, so it is wrapped at its source and in every
module that already holds it. Nothing of vLLM is imported here: a hook runs while vLLM's own
imports are under way, and one more of them could close a circle.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import wrapt

from . import vllm_compat
from .log import logger

_registered = False


def register() -> None:
    """Registers the post-import hooks, once a process. A module that is imported already is
    treated at once."""
    global _registered
    if _registered:
        return
    _registered = True
    wrapt.register_post_import_hook(_guarded(_rebind_loaded), vllm_compat.LOADED_SOURCE)
    for name in vllm_compat.LOADED_HOLDERS:
        wrapt.register_post_import_hook(_guarded(_rebind_holder), name)
    wrapt.register_post_import_hook(_guarded(_spare_daemon), vllm_compat.LOADED_NOT_SERVING)
    wrapt.register_post_import_hook(_guarded(_export_metrics), vllm_compat.METRICS_SOURCE)
    for name in vllm_compat.WORKER_MODULES:
        wrapt.register_post_import_hook(_guarded(_watch_worker), name)


def _guarded(hook: Any) -> Any:
    """A hook that fails leaves vLLM as it was: an exception here would break vLLM's import."""

    def run(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception:
            logger.exception(
                "expert cache: could not hook %s; the model serves without the cache",
                module.__name__,
            )

    return run


def _around_loading(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
    config = args[1] if len(args) > 1 else kwargs.get("model_config")
    with _watching(config):
        result = wrapped(*args, **kwargs)
    try:
        from . import arming, lifecycle  # torch: only where a model is loaded

        model = args[0] if args else kwargs["model"]
        if arming.arm_model(model, config).armed:
            lifecycle.watch_model(type(model))
    except Exception:
        logger.exception("expert cache: cannot arm; the model serves without the cache")
    return result


def _watching(config: Any) -> AbstractContextManager:
    if not hasattr(vllm_compat.loading_module(), vllm_compat.LOADING_CONTEXT):
        return nullcontext()
    try:
        from . import reoffload

        return reoffload.watching(config)
    except Exception:
        logger.exception("expert cache: experts that vLLM leaves in device memory stay there")
        return nullcontext()


def _rebind_loaded(module: ModuleType) -> None:
    """Wraps the function at its source, then in every module that took it before."""
    original = getattr(module, vllm_compat.LOADED, None)
    if original is None:
        logger.warning(
            "expert cache: %s has no %s in this vLLM; the model serves without the cache",
            module.__name__, vllm_compat.LOADED,
        )  # fmt: skip
        return
    if _is_ours(original):
        return
    setattr(module, vllm_compat.LOADED, wrapt.FunctionWrapper(original, _around_loading))
    for holder in list(sys.modules.values()):
        if holder is not module:
            _rebind(holder, original)


def _rebind_holder(module: ModuleType) -> None:
    """A module that was imported while the source was not wrapped yet."""
    source = sys.modules.get(vllm_compat.LOADED_SOURCE)
    wrapper = getattr(source, vllm_compat.LOADED, None)
    if _is_ours(wrapper):
        _rebind(module, wrapper.__wrapped__)


def _spare_daemon(module: ModuleType) -> None:
    """The weight cache daemon loads models that it never runs."""
    held = vars(module).get(vllm_compat.LOADED)
    if _is_ours(held):
        setattr(module, vllm_compat.LOADED, held.__wrapped__)


def _rebind(holder: Any, original: Any) -> None:
    """Wraps what a module took by name, be it the function or another package's wrapper of it."""
    # __dict__, not getattr(): a lazy module would import something, a mock would say yes.
    held = getattr(holder, "__dict__", {}).get(vllm_compat.LOADED)
    if held is None or getattr(holder, "__name__", "") == vllm_compat.LOADED_NOT_SERVING:
        return
    if _innermost(held) is _innermost(original) and not _is_ours(held):
        setattr(holder, vllm_compat.LOADED, wrapt.FunctionWrapper(held, _around_loading))


def _innermost(function: Any) -> Any:
    while getattr(function, "__wrapped__", None) is not None:
        function = function.__wrapped__
    return function


def _is_ours(function: Any) -> bool:
    return getattr(function, "_self_wrapper", None) is _around_loading


def _export_metrics(module: ModuleType) -> None:
    from . import metrics  # imports prometheus_client, as the module has just done

    metrics.register()


def _watch_worker(module: ModuleType) -> None:
    from . import lifecycle

    worker = getattr(module, vllm_compat.WORKER_MODULES[module.__name__], None)
    if worker is not None:
        lifecycle.watch(worker)
