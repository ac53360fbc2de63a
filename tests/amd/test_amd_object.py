"""The committed object: what it is built from, what it needs and what it offers."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from code_objects import ARCHITECTURES, LIBRARY, ROOT, extract, output_of, require
from describe_object import DOCUMENT, table

KERNELS = {
    f"expert_cache_{name}_kernel" for name in ("manage", "manage_general", "gather", "preload")
}
# clang exports a kernel's handle under the kernel's name, and an empty mark of the compilation
# unit, whatever the visibility.
EXPORTED_BY_CLANG = KERNELS | {"__hip_cuid_"}


def compilers_of(library: Path) -> str:
    """What the compilers and linkers wrote about themselves."""
    return output_of("llvm-readelf-19", "-p", ".comment", library)


def dynamic_symbols(library: Path, which: str) -> set[str]:
    lines = output_of("llvm-nm-19", "-D", which, library).splitlines()
    return {line.split()[-1] for line in lines}


def test_checksum_is_that_of_the_object() -> None:
    recorded = LIBRARY.with_name(f"{LIBRARY.name}.sha256").read_text()
    digest = hashlib.sha256(LIBRARY.read_bytes()).hexdigest()
    assert recorded == f"{digest}  {LIBRARY.name}\n"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A build of the same source from another folder, in another locale and time zone."""
    require("clang-19", "lld-19", "clang-offload-bundler-19", "llvm-readelf-19")
    folder = tmp_path_factory.mktemp("an other place")
    shutil.copytree(ROOT / "hip", folder / "hip")
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
        "CLANG": "clang-19",
    }
    done = subprocess.run(
        [folder / "hip" / "build.sh", "hip", "--with", "clang", folder / LIBRARY.name],
        env=environment, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done.library = folder / LIBRARY.name
    return done


def test_rebuild_is_byte_identical(rebuilt: subprocess.CompletedProcess[str]) -> None:
    ours, committed = compilers_of(rebuilt.library), compilers_of(LIBRARY)
    if ours != committed:
        pytest.skip(f"other compilers than the committed object's: {ours} instead of {committed}")
    assert rebuilt.library.read_bytes() == LIBRARY.read_bytes(), "run `make hip` and commit"


def test_build_has_no_warnings(rebuilt: subprocess.CompletedProcess[str]) -> None:
    assert rebuilt.stderr == ""


def test_object_holds_no_path_of_the_build(rebuilt: subprocess.CompletedProcess[str]) -> None:
    content = rebuilt.library.read_bytes()
    assert str(rebuilt.library.parent).encode() not in content
    assert b"/tmp/" not in content


def test_only_libc_is_needed() -> None:
    require("llvm-readelf-19")
    dynamic = output_of("llvm-readelf-19", "-d", LIBRARY)
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
    assert not re.search(r"RPATH|RUNPATH", dynamic)


def test_libc_may_be_old() -> None:
    """2.17 is what manylinux2014 promises; ROCm images are newer."""
    require("llvm-readelf-19")
    versions = re.findall(r"GLIBC_2\.(\d+)", output_of("llvm-readelf-19", "-V", LIBRARY))
    assert versions and max(map(int, versions)) <= 17


def test_undefined_hip_symbols_are_the_documented_ones() -> None:
    require("llvm-nm-19")
    undefined = dynamic_symbols(LIBRARY, "--undefined-only")
    block = re.search(r"<!-- hip symbols -->\n```\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert {name for name in undefined if "hip" in name} == set(block.group(1).split())


def test_exports_are_the_c_interface_and_what_clang_adds() -> None:
    require("llvm-nm-19")
    header = (ROOT / "hip" / "expert_cache.h").read_text()
    interface = set(re.findall(r"^EXPERT_CACHE_API [^;(]*?(\w+)\(", header, re.M))
    assert len(interface) == 16
    assert dynamic_symbols(LIBRARY, "--defined-only") == interface | EXPORTED_BY_CLANG


def test_every_architecture_has_a_code_object(tmp_path: Path) -> None:
    objects = extract(LIBRARY, tmp_path)
    assert set(objects) == set(ARCHITECTURES)
    for code_object in objects.values():
        assert set(code_object.kernels) == KERNELS


def test_code_object_version_is_five(tmp_path: Path) -> None:
    """Newer compilers make version 6 unless told otherwise, which older ROCm does not load."""
    for code_object in extract(LIBRARY, tmp_path).values():
        header = output_of("llvm-readelf-19", "-h", code_object.path)
        assert re.search(r"ABI Version: +3$", header, re.M)


def test_document_describes_this_object() -> None:
    require("llvm-readelf-19", "llvm-objdump-19")
    document = DOCUMENT.read_text()
    assert table(LIBRARY) in document, "run `python tests/amd/describe_object.py`"
