"""The `EXPERT_CACHE_*` environment variables as one frozen dataclass.

`Settings` holds the values and their defaults, `VARIABLES` says of each variable what it allows
and means. The error texts and the documentation are made from the same two.

Three variables can say how many experts of a layer stay in device memory, the most definite one
that is set wins: `EXPERT_CACHE_SLOTS`, then `EXPERT_CACHE_GIB`, then `EXPERT_CACHE_FRACTION`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX = "EXPERT_CACHE_"
POLICIES = ("lrfu", "lru", "lfu", "fifo", "slru")
STORAGES = ("auto", "virtual", "plain")
AUTO_ON_OFF = ("auto", "on", "off")
METRICS = ("model", "layer", "off")
DEFAULT_FRACTION = 0.5
# Workgroups in one gather launch: the smallest limit of a grid dimension that any GPU has.
MAX_GATHER_WORKGROUPS = 65535


class SettingsError(ValueError):
    """A value is not allowed. One line: the variable, the value found, what is allowed."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, checked. `VARIABLES` describes each field."""

    disable: bool = False
    slots: int | None = None
    gib: float | None = None
    fraction: float | None = None
    policy: str = "lrfu"
    half_life: float = 24.0
    decay: int = 64
    lib: str | None = None
    chunks: int = 16
    lanes: int = 1
    storage: str = "auto"
    overflow: str = "auto"
    preload: str = "auto"
    allow_cpu: bool = False
    snapshot: str | None = None
    metrics: str = "model"
    log_interval: float = 60.0
    trace: str | None = None
    unknown: tuple[str, ...] = ()
    """One line of warning for each `EXPERT_CACHE_*` name that is not a variable of ours."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads every variable of `VARIABLES`; a blank value counts as unset.

        Raises `SettingsError` for the first value that is not allowed.
        """
        values: dict[str, object] = {}
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip()
            if text:
                values[variable.field] = variable.value_of(text)
        settings = cls(unknown=_unknown_names(environ), **values)
        if settings.chunks * settings.lanes > MAX_GATHER_WORKGROUPS:
            raise SettingsError(
                f"EXPERT_CACHE_CHUNKS={settings.chunks} times EXPERT_CACHE_LANES={settings.lanes} "
                f"is {settings.chunks * settings.lanes} workgroups: allowed is a product of at "
                f"most {MAX_GATHER_WORKGROUPS}"
            )
        return settings

    def slots_for(self, experts: int, bytes_per_slot: int) -> int:
        """How many experts of a layer with `experts` of them to keep in device memory.

        bytes_per_slot: device bytes that one more slot costs in all layers of this rank together.
        Returns 1 or more, and `experts` or more where the budget covers the whole layer: such a
        layer needs no cache, and what happens to it is the caller's to decide.
        Raises `SettingsError` where `EXPERT_CACHE_GIB` does not pay for one slot.
        """
        if self.slots is not None:
            return self.slots
        if self.gib is not None:
            slots = int(self.gib * 2**30) // bytes_per_slot
            if slots < 1:
                raise SettingsError(
                    f"EXPERT_CACHE_GIB={self.gib:g} pays for no slot: allowed is "
                    f"{bytes_per_slot / 2**30:.4g} or more, which is one slot in every layer"
                )
            return slots
        # The margin undoes binary rounding: 0.29 of 100 is 29, where 0.29 * 100 is 28.999...96.
        fraction = DEFAULT_FRACTION if self.fraction is None else self.fraction
        return max(1, math.floor(fraction * experts + 1e-9))

    @property
    def names_a_budget(self) -> bool:
        """Whether the environment says how many slots to take; else the default may give way."""
        return not (self.slots is None and self.gib is None and self.fraction is None)


@dataclass(frozen=True)
class Variable:
    """One environment variable: the `Settings` field it sets, what it allows, what it means."""

    field: str
    parse: Callable[[str], object]
    """Text without blanks around it, never empty, to a value; ValueError if it is not allowed."""
    allowed: str
    meaning: str

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def default(self) -> str:
        """As one would write it in a shell; empty where unset is a case of its own."""
        value = getattr(Settings, self.field)
        if value is None:
            return ""
        return value if isinstance(value, str) else f"{value:g}"

    def value_of(self, text: str) -> object:
        try:
            return self.parse(text)
        except ValueError:
            found = text if len(text) <= 60 else text[:57] + "..."
            raise SettingsError(f"{self.name}={found!r}: allowed is {self.allowed}") from None


def _switch(text: str) -> bool:
    return _one_of(("0", "1"))(text) == "1"


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError
        return text.lower()

    return parse


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # int() also takes "1_000" and the digits of other scripts.
        if not (text.isascii() and text.removeprefix("+").isdigit()):
            raise ValueError
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _number(allowed: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not text.isascii() or "_" in text:
            raise ValueError
        value = float(text)
        if not (math.isfinite(value) and allowed(value)):
            raise ValueError
        return value

    return parse


def _word_or_path(*words: str) -> Callable[[str], str]:
    return lambda text: text.lower() if text.lower() in words else text


VARIABLES: tuple[Variable, ...] = (
    Variable("disable", _switch, "0 or 1", "1 makes the shim inert without uninstalling it"),
    Variable(
        "slots",
        _whole(1, 2**31 - 1),
        "a whole number from 1 to 2147483647",
        "experts of each layer kept in device memory; wins over GIB and FRACTION",
    ),
    Variable(
        "gib",
        _number(lambda value: 0 < value <= 2**20),
        "a number above 0, at most 1048576",
        "GiB of device memory for the slots of all layers of one rank together; "
        "rows for overflow come on top; wins over FRACTION",
    ),
    Variable(
        "fraction",
        _number(lambda value: 0 < value <= 1),
        "a number above 0, at most 1",
        "share of each layer's experts kept in device memory, rounded down to at least one expert; "
        "unset: a half, or less where that would not fit beside the KV cache",
    ),
    Variable(
        "policy",
        _one_of(POLICIES),
        "one of " + ", ".join(POLICIES),
        "which resident expert loses its slot to a missed one",
    ),
    Variable(
        "half_life",
        _number(lambda value: 1 <= value <= 10000),
        "a number from 1 to 10000",
        "lrfu only: steps in which a score halves",
    ),
    Variable(
        "decay",
        _whole(1, 2**31 - 1),
        "a whole number from 1 to 2147483647",
        "lfu only: steps between two halvings of every count",
    ),
    Variable(
        "lib", str, "the path of a file", "kernel library to load in place of the package's own"
    ),
    Variable(
        "chunks",
        _whole(1, 4096),
        f"a whole number from 1 to 4096, CHUNKS times LANES at most {MAX_GATHER_WORKGROUPS}",
        "workgroups that share the copy of one record",
    ),
    Variable(
        "lanes",
        _whole(1, 4096),
        f"a whole number from 1 to 4096, CHUNKS times LANES at most {MAX_GATHER_WORKGROUPS}",
        "records copied at the same time",
    ),
    Variable(
        "storage",
        _one_of(STORAGES),
        "one of " + ", ".join(STORAGES),
        "how a layer's rows are laid out; auto takes virtual where it proves itself, else plain",
    ),
    Variable(
        "overflow",
        _one_of(AUTO_ON_OFF),
        "one of " + ", ".join(AUTO_ON_OFF),
        "whether steps with more experts than slots go through overflow rows (on) or are read "
        "from host memory (off)",
    ),
    Variable(
        "preload",
        _one_of(AUTO_ON_OFF),
        "one of " + ", ".join(AUTO_ON_OFF),
        "whether a step that routes to nearly every expert, such as a long prompt, fetches the "
        "next layer's experts while one layer computes; takes overflow rows twice; auto: on a GPU "
        "with room for them",
    ),
    Variable(
        "allow_cpu",
        _switch,
        "0 or 1",
        "for tests on a machine without a GPU: "
        "1 also serves layers whose weights are ordinary CPU tensors",
    ),
    Variable(
        "snapshot",
        _word_or_path("off"),
        "the path of a folder, or off",
        "where each process leaves its counters; off writes none; unset chooses a folder",
    ),
    Variable(
        "metrics",
        _one_of(METRICS),
        "one of " + ", ".join(METRICS),
        "what the server adds to its /metrics: sums of each model, every layer on its own, or "
        "nothing",
    ),
    Variable(
        "log_interval",
        _number(lambda value: value == 0 or 0.1 <= value <= 86400),
        "0, or a number from 0.1 to 86400",
        "seconds between two lines of log about a model in use; 0 logs none",
    ),
    Variable(
        "trace",
        _word_or_path("on", "off"),
        "on, off, or the path of a folder",
        "where each process leaves the routing of its last tokens, for expert-cache trace record; "
        "on chooses a folder; unset is off",
    ),
)


def _unknown_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {variable.name for variable in VARIABLES}
    return tuple(
        _unknown_name_warning(name, known)
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    )


def _unknown_name_warning(name: str, known: set[str]) -> str:
    import difflib  # only a process with a misspelt variable pays for it

    # Compared without the prefix, which would make every name look alike.
    endings = [other.removeprefix(PREFIX) for other in sorted(known)]
    meant = difflib.get_close_matches(name.removeprefix(PREFIX)[:60].upper(), endings, n=1)
    name = name if len(name) <= 60 else name[:57] + "..."
    hint = f"did you mean {PREFIX}{meant[0]}?" if meant else "the README lists those there are"
    return f"{name!r} is not a variable of the expert cache and is ignored: {hint}"
