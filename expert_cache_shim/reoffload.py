"""Experts that vLLM was to offload and left in device memory: moved to the host by its own code.

After a layer's weights are processed vLLM moves those that were offloaded back to the host. It
looks for parameters that do not carry its flag, because processing used to make new ones. vLLM
0.33 puts the processed tensor into the parameter it has, flag included, wherever shape, stride or
type change (as when weights are repacked for Marlin). Then nothing is moved, and the flag says
"host" of device memory. Taking the flag off what the driver says is device memory, before vLLM
looks, is all that is needed.

In every version vLLM knows parameters by name, and some methods give the packed weights another
one while they repack them (compressed-tensors' NVFP4 and MXFP4). Those are given the flag, and
vLLM's code is entered a second time, in which it is taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from . import arming, native, vllm_compat
from .discovery import layer_tensors
from .log import logger
from .refusals import Refusal, check_served
from .settings import Settings, SettingsError


@contextmanager
def watching(model_config: Any) -> Iterator[None]:
    """Around vLLM's processing of a model's weights. A layer that the cache would refuse stays
    where vLLM leaves it, and so does every module without experts."""
    module, name = vllm_compat.loading_module(), vllm_compat.LOADING_CONTEXT
    original = getattr(module, name)
    repair = _Repair(original, model_config)
    setattr(module, name, repair.loading_context)
    try:
        yield
    finally:
        setattr(module, name, original)
        repair.say()


class _Repair:
    def __init__(self, original: Callable[..., AbstractContextManager], model_config: Any) -> None:
        self._original = original
        self._model_config = model_config
        self._layers = 0

    @contextmanager
    def loading_context(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """vLLM's context, in which one module's weights are processed."""
        with self._original(module, *args, **kwargs) as entered:
            offloaded = dict(vllm_compat.offloaded_parameters(module))
            yield entered
            try:
                if offloaded and vllm_compat.is_moe_layer(module):
                    again = partial(self._original, module, *args, **kwargs)
                    self._repair(module, offloaded.keys(), again)
            except (Refusal, SettingsError, native.LibraryError) as reason:
                logger.debug("expert cache: experts are left where they are: %s", reason)
            except Exception:
                logger.exception("expert cache: cannot tell where a layer's weights lie")

    def _repair(
        self, layer: torch.nn.Module, names: Set[str],
        again: Callable[[], AbstractContextManager],
    ) -> None:  # fmt: skip
        """names: parameters that carried the flag before processing; vLLM moves no others. again:
        vLLM's context once more, inside of it."""
        settings = Settings.from_environment()
        if settings.disable:
            return
        check_served(layer, self._model_config, settings)

        def lies_on_device(parameter: torch.nn.Parameter) -> bool:
            library = arming.load_library(parameter.device, settings)
            return library.pointer_kind(parameter.data_ptr()) == native.DEVICE

        flagged = vllm_compat.offloaded_parameters(layer)
        stale = [p for name, p in flagged if name in names and lies_on_device(p)]
        vllm_compat.set_offloaded(stale, False)
        renamed = [p for p in _renamed(layer, names) if lies_on_device(p)]
        if renamed:
            _move(renamed, again)
        self._layers += bool(stale or renamed)

    def say(self) -> None:
        if self._layers:
            logger.info(
                "expert cache: vLLM left the experts of %d layers of %s in device memory after it "
                "had repacked them, though they are to be offloaded; they were moved to the host",
                self._layers, vllm_compat.model_name(self._model_config),
            )  # fmt: skip


def _move(
    parameters: list[torch.nn.Parameter], again: Callable[[], AbstractContextManager]
) -> None:
    vllm_compat.set_offloaded(parameters, True)
    try:
        with again():
            vllm_compat.set_offloaded(parameters, False)
    except Exception:
        vllm_compat.set_offloaded(parameters, False)
        raise


def _renamed(layer: torch.nn.Module, names: Set[str]) -> list[torch.nn.Parameter]:
    """Tensors of the experts that are new, where others that were to be offloaded are gone."""
    found = dict(layer.named_parameters())
    if names <= found.keys():
        return []
    expert_names = layer_tensors(layer).keys() - names
    return [p for name, p in found.items() if name in expert_names and p.numel()]
