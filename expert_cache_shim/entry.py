"""What stands in place of a quant method's `apply`: sends each armed layer to its own cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import ArmedLayer


class Entry:
    """An attribute of one quant method; no class is touched. It goes when its last layer does.

    A quant method may serve several layers, and some of them may not be armed.
    """

    def __init__(self, method: Any) -> None:
        self.original = method.apply
        self._method = method
        self._signature = inspect.signature(self.original)
        self._armed: list[ArmedLayer] = []

    @classmethod
    def of(cls, method: Any) -> Entry | None:
        """The one in front of a method, if there is one."""
        held = getattr(method, "__dict__", {}).get("apply")
        return held if isinstance(held, cls) else None

    def armed(self, layer: Any) -> ArmedLayer | None:
        # Mostly there is one. No look-up by id(): torch.compile traces through this on a CPU.
        for armed in self._armed:
            if armed.serves(layer):
                return armed
        return None

    def add(self, armed: ArmedLayer) -> None:
        self._armed.append(armed)
        self._method.apply = self

    def remove(self, armed: ArmedLayer) -> None:
        """Gives its layer back to vLLM's own path."""
        self._armed.remove(armed)
        if not self._armed:
            del vars(self._method)["apply"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM calls by name; what is called otherwise is given names, where it has them."""
        armed = None if args else self.armed(kwargs.get("layer"))
        if armed is not None:
            return armed.apply(kwargs)
        bound = self._signature.bind(*args, **kwargs).arguments
        armed = self.armed(bound.get("layer"))
        if armed is None or "topk_ids" not in bound:
            return self.original(*args, **kwargs)
        return armed.apply(bound)

    def __reduce__(self) -> tuple:
        """A deep or pickled copy of the method gets vLLM's own `apply`, which is all that it has
        when this is called on it: a cache is not copied."""
        return getattr, (self._method, "apply")
