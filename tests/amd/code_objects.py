"""Takes a HIP fat object apart with LLVM 19's tools: code objects, their metadata, their code."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "expert_cache_shim" / "lib" / "libexpertcache_hip.so"
ARCHITECTURES = ("gfx90a", "gfx942", "gfx1201")

_PACKAGES = {
    "clang-19": "clang-19",
    "lld-19": "lld-19",
    "clang-offload-bundler-19": "clang-tools-19",
    "llvm-objdump-19": "llvm-19",
    "llvm-objcopy-19": "llvm-19",
    "llvm-nm-19": "llvm-19",
    "llvm-readelf-19": "llvm-19",
    "gcc": "gcc",
    "g++": "g++",
}


def require(*tools: str) -> None:
    """Skips the test when a tool is missing, and says which package brings it."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing; Debian's package {_PACKAGES[tool]} brings it")


def output_of(*command: object) -> str:
    """Standard output of a command; its error output is the message when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Kernel:
    """One kernel of one architecture.

    metadata: the code object's notes (`.private_segment_fixed_size`, ...), numbers as int.
    arguments: the explicit arguments' sizes in bytes, in order.
    code: the disassembly, one instruction a line without its address.
    """

    name: str
    architecture: str
    metadata: dict[str, int]
    arguments: tuple[int, ...]
    code: tuple[str, ...]

    def count(self, pattern: str) -> int:
        """Instructions whose text matches the pattern from its start."""
        return sum(bool(re.match(pattern, line)) for line in self.code)


@dataclass(frozen=True)
class CodeObject:
    path: Path
    architecture: str

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        require("llvm-readelf-19", "llvm-objdump-19")
        notes = output_of("llvm-readelf-19", "--notes", self.path)
        body = re.search(r"^amdhsa\.kernels:\n(.*?)^amdhsa\.", notes, re.M | re.S)
        assert body, f"{self.path} has no kernels in its notes"
        found = {}
        for entry in re.split(r"^  - ", body.group(1), flags=re.M)[1:]:
            # Kernel fields are indented by four, fields of the `.args` list by more.
            fields = dict(re.findall(r"^ {0,4}(\.\w+): +(\S+)$", entry, re.M))
            metadata = {key: int(value) for key, value in fields.items() if value.isdecimal()}
            arguments = tuple(
                int(size)
                for size, kind in re.findall(r"\.size: +(\d+)\n +\.value_kind: +(\w+)", entry)
                if not kind.startswith("hidden_")
            )
            name = fields[".name"]
            found[name] = Kernel(name, self.architecture, metadata, arguments, self._code_of(name))
        return found

    def _code_of(self, kernel: str) -> tuple[str, ...]:
        text = output_of(
            "llvm-objdump-19", "-d", "--no-show-raw-insn", f"--mcpu={self.architecture}",
            f"--disassemble-symbols={kernel}", self.path,
        )  # fmt: skip
        lines = [line.split("//")[0].strip() for line in text.splitlines() if line.startswith("\t")]
        while lines and lines[-1] in ("s_nop 0", "s_code_end"):  # padding after the end
            lines.pop()
        assert lines, f"no code of {kernel} in {self.path}"
        return tuple(lines)


def extract(library: Path, folder: Path) -> dict[str, CodeObject]:
    """The code objects of a fat object by architecture, written to `folder`."""
    require("llvm-objcopy-19", "clang-offload-bundler-19")
    bundle = folder / "bundle"
    output_of("llvm-objcopy-19", "-O", "binary", "--only-section=.hip_fatbin", library, bundle)
    bundler = ("clang-offload-bundler-19", "--type=o", f"--input={bundle}")
    found = {}
    for target in output_of(*bundler, "--list").split():
        if target.startswith("host"):
            continue
        architecture = target.rpartition("-")[2]
        path = folder / f"{architecture}.co"
        output_of(*bundler, "--unbundle", f"--targets={target}", f"--output={path}")
        found[architecture] = CodeObject(path, architecture)
    return found
