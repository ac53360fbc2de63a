"""Drives the stand-in for libamdhip64 (stand_in/libamdhip64.c) from a fresh process.

What a process has loaded, and in which scope, cannot be undone: every scenario runs in an
interpreter of its own and hands plain data back.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parent / "stand_in"
RUNTIME = "libamdhip64.so.7"
TORCH_LIKE = "libtorch_like.so"


def build(folder: Path, *flags: str) -> Path:
    """Compiles the stand-in and the library that depends on it; skips without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang-19")
    if compiler is None:
        pytest.skip("no C compiler; Debian's package gcc brings one")
    options = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    runtime, torch_like = folder / RUNTIME, folder / TORCH_LIKE
    source = SOURCES / "libamdhip64.c"
    soname = f"-Wl,-soname,{RUNTIME}"
    subprocess.run([*options, *flags, soname, source, "-o", runtime], check=True)
    link = [runtime, f"-Wl,-rpath,{folder}"]
    subprocess.run([*options, SOURCES / "torch_like.c", *link, "-o", torch_like], check=True)
    return folder


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a fresh interpreter; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


@dataclass(frozen=True)
class Call:
    """One recorded call: the HIP function and its arguments, numbers as int where they are."""

    function: str
    arguments: dict[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]


def _value(text: str) -> Any:
    if text == "(nil)":
        return 0
    try:
        return int(text, 0)
    except ValueError:
        return text


class StandIn:
    """The stand-in as loaded into this process the way torch loads HIP: RTLD_LOCAL."""

    def __init__(self, folder: Path) -> None:
        self._torch_like = ctypes.CDLL(str(folder / TORCH_LIKE))
        self._library = ctypes.CDLL(str(folder / RUNTIME))
        self._library.stand_in_record.restype = ctypes.c_char_p

    def calls(self, *functions: str) -> list[Call]:
        """The calls so far, in order: all, or those of the named functions."""
        found = []
        for line in self._library.stand_in_record().decode().splitlines():
            function, *arguments = line.split()
            if not functions or function in functions:
                pairs = (argument.partition("=") for argument in arguments)
                found.append(Call(function, {key: _value(value) for key, _, value in pairs}))
        return found

    def forget(self) -> None:
        self._library.stand_in_forget()

    def fail(self, function: str, nth: int, code: int) -> None:
        """Makes the nth call of a HIP function from now on return an error code."""
        self._library.stand_in_fail(function.encode(), nth, code)

    def describe_arguments(self, kernel: str, sizes: tuple[int, ...]) -> None:
        """Tells the bytes of a registered kernel's arguments, so that launches record them."""
        for size in sizes:
            code = self._library.stand_in_add_argument(kernel.encode(), ctypes.c_size_t(size))
            if code:
                raise LookupError(f"{kernel} is not registered")

    def last_error(self) -> int:
        """The error that PyTorch would find after its own next launch, and blame on itself."""
        return self._torch_like.torch_like_last_error()

    def set_version(self, version: int) -> None:
        """What hipRuntimeGetVersion answers: 60342134 for ROCm 6.3."""
        self._library.stand_in_set_version(version)

    def set_pointer_type(self, type_: int) -> None:
        """The hipMemoryType of every pointer."""
        self._library.stand_in_set_pointer_type(type_)

    def live(self) -> dict[str, int]:
        """What was made and not yet given back."""
        return {
            "handles": self._library.stand_in_live_handles(),
            "reservations": self._library.stand_in_live_reservations(),
            "mappings": self._library.stand_in_live_mappings(),
        }
