"""Builds the fuzzer of the C interface and runs it: `python fuzzer.py [SECONDS [CORPUS]]`.

With clang and its libFuzzer, which looks for inputs that reach new code; else with any compiler
that has the sanitizers, and random inputs. CORPUS is a folder to keep inputs in.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "fuzz" / "fuzz_interface.cpp"
COMPILERS = ("clang++-19", "clang++", "g++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-O1", "-g", "-fno-sanitize-recover=all"]
WAYS = (
    ["-fsanitize=fuzzer,address,undefined"],
    ["-fsanitize=address,undefined", "-DEXPERT_CACHE_FUZZ_RANDOM"],
)


class NoCompiler(RuntimeError):
    """Nothing here can build the fuzzer."""


class Fuzzer:
    """A built fuzzer. `guided`: libFuzzer chooses the inputs."""

    def __init__(self, program: Path, guided: bool) -> None:
        self.program = program
        self.guided = guided

    @classmethod
    def build(cls, folder: Path, *flags: str) -> Fuzzer:
        """Raises NoCompiler, or CalledProcessError where a compiler that could does not."""
        for way in WAYS:
            for compiler in filter(shutil.which, COMPILERS):
                if _can_build(compiler, way, folder):
                    program = folder / "fuzz_interface"
                    command = [compiler, *FLAGS, *way, *flags, str(SOURCE), "-o", str(program)]
                    subprocess.run(command, check=True, capture_output=True, text=True)
                    return cls(program, guided=way is WAYS[0])
        raise NoCompiler("no C++ compiler with the address and undefined-behaviour sanitizers")

    def run(self, runs: int, folder: Path) -> subprocess.CompletedProcess[str]:
        """A fixed number of inputs, the same in every call where they are not guided. What made
        it fail lies in `folder`."""
        options = [f"-runs={runs}", "-seed=1", "-max_len=256"] if self.guided else [str(runs)]
        command = [str(self.program), *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def _can_build(compiler: str, way: list[str], folder: Path) -> bool:
    """Whether a compiler has what a way needs: its sanitizers are packages of their own."""
    source = folder / "empty.cpp"
    source.write_text(
        'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }'
        if way is WAYS[0]
        else "int main() { return 0; }"
    )
    command = [compiler, *way, str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True).returncode == 0


def main(seconds: int = 60, corpus: str = "") -> int:
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer.build(Path(folder))
        command = [str(fuzzer.program), str(seconds * 500)]
        if fuzzer.guided:
            command = [str(fuzzer.program), f"-max_total_time={seconds}", "-max_len=256"]
        if corpus:
            Path(corpus).mkdir(parents=True, exist_ok=True)
            command.append(corpus)
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*(f(a) for f, a in zip((int, str), sys.argv[1:]))))
