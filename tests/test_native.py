"""The binding of the kernel library: every way it can be unusable, and the layout it mirrors."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expert_cache_shim import native, policy
from expert_cache_shim.native import Gather, LibraryError, Manage, Tensor, load

ROOT = Path(__file__).parent.parent
HEADER = ROOT / "hip" / "expert_cache.h"
REMEDY = f"run `make -C {ROOT} host`, or set EXPERT_CACHE_LIB to a library that fits"


def compile_c(output, source, *flags):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run(
        [compiler, "-x", "c++", "-", "-I", str(HEADER.parent), "-o", str(output), *flags],
        input=source, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def stand_in(output, backend="host", abi=native.ABI_VERSION, without=()):
    """A library whose functions do nothing, with the given backend, ABI or missing functions."""
    bodies = {name: f"int {name}() {{ return 0; }}" for name in declared_functions()}
    for name, answer in [("backend", backend), ("architectures", "x"), ("error_string", "x")]:
        name = f"expert_cache_{name}"
        bodies[name] = f'const char *{name}() {{ return "{answer}"; }}'
    bodies["expert_cache_abi_version"] = f"int expert_cache_abi_version() {{ return {abi}; }}"
    code = "\n".join(body for name, body in bodies.items() if name not in without)
    return compile_c(output, f'extern "C" {{ {code} }}', "-shared", "-fPIC")


def declared_functions():
    return re.findall(r"EXPERT_CACHE_API [\w *]*?(expert_cache_\w+)\(", HEADER.read_text())


def refusal(*arguments):
    with pytest.raises(LibraryError) as error:
        load(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# A library that fits


def test_the_host_library_says_what_it_is(host_library, host_library_path):
    assert host_library.path == host_library_path
    assert host_library.backend == "host"
    assert host_library.pointer_kind(id(host_library)) == native.HOST_READABLE


def test_the_default_path_is_beside_the_package(host_library_path):
    assert load("host").path == host_library_path


def test_a_kernel_error_carries_the_code_and_the_librarys_text(host_library):
    with pytest.raises(native.KernelError) as error:
        host_library.manage(Manage())
    text = host_library._handle.expert_cache_error_string(error.value.code).decode()
    assert error.value.code < 0 and len(text) > 3
    assert str(error.value) == f"expert_cache_manage failed with code {error.value.code}: {text}"


def test_every_error_code_has_a_text_of_its_own(host_library):
    describe = host_library._handle.expert_cache_error_string
    texts = {describe(code) for code in range(-14, 1)}
    assert len(texts) == 15 and all(texts)
    assert describe(-15) and describe(999)


def test_the_binding_needs_nothing_but_the_standard_library():
    code = (
        "import sys, expert_cache_shim.native\n"
        "print([m for m in ('numpy', 'torch', 'vllm', 'wrapt') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# Libraries that do not


def test_a_backend_that_is_none():
    with pytest.raises(ValueError) as error:
        load("rocm")
    assert str(error.value) == "backend is 'rocm'; it must be one of hip, cuda, host"


def test_a_missing_file(tmp_path):
    file = tmp_path / "absent.so"
    assert refusal("host", file) == f"{file}: No such file or directory; {REMEDY}"
    assert f"run `make -C {ROOT} cuda`" in refusal("cuda", file)


def test_a_folder(tmp_path):
    assert refusal("host", tmp_path) == f"{tmp_path}: not a regular file; {REMEDY}"


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"#!/bin/sh\n" * 20])
def test_what_is_no_library(tmp_path, content):
    file = tmp_path / "library.so"
    file.write_bytes(content)
    size = len(content)
    assert refusal("host", file) == (
        f"{file}: is not a 64-bit little-endian ELF library ({size} bytes); {REMEDY}"
    )


def test_a_32_bit_library(tmp_path):
    file = tmp_path / "library.so"
    file.write_bytes(b"\x7fELF\x01\x01" + bytes(200))
    assert "is not a 64-bit little-endian ELF library" in refusal("host", file)


@pytest.mark.parametrize("kept", [6, 63, 64, 1000, 0.25, 0.5, 0.9, -1])
def test_a_truncated_library(tmp_path, host_library_path, kept):
    whole = host_library_path.read_bytes()
    file = tmp_path / "library.so"
    file.write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    assert re.fullmatch(
        rf"{file}: is truncated, {file.stat().st_size} of at least \d+ bytes; {REMEDY}",
        refusal("host", file),
    )


def test_a_truncated_library_without_section_table(tmp_path, host_library_path):
    """Stripped of its section table, a library is still as long as its segments say."""
    image = bytearray(host_library_path.read_bytes())
    image[40:48] = bytes(8)  # e_shoff
    image[58:64] = bytes(6)  # e_shentsize, e_shnum, e_shstrndx
    file = tmp_path / "library.so"
    file.write_bytes(image[:4000])
    assert "is truncated, 4000 of at least" in refusal("host", file)


def test_a_damaged_header(tmp_path, host_library_path):
    image = bytearray(host_library_path.read_bytes())
    image[32:40] = b"\xff" * 8  # e_phoff
    file = tmp_path / "library.so"
    file.write_bytes(image)
    assert "is truncated" in refusal("host", file)


def test_a_library_that_the_loader_refuses(tmp_path):
    file = compile_c(
        tmp_path / "library.so",
        "int nowhere(); int here() { return nowhere(); }",
        "-shared", "-fPIC", "-Wl,-z,now",
    )  # fmt: skip
    message = refusal("host", file)
    assert message.startswith(f"{file}: cannot be loaded: ") and "nowhere" in message
    assert message.endswith(REMEDY)


def test_another_abi_version(tmp_path):
    file = stand_in(tmp_path / "library.so", abi=7)
    assert refusal("host", file) == (
        f"{file}: has ABI version 7, but this package needs {native.ABI_VERSION}; {REMEDY}"
    )


def test_another_abi_version_explains_a_missing_function(tmp_path):
    file = stand_in(tmp_path / "library.so", abi=0, without=["expert_cache_gather"])
    assert "has ABI version 0" in refusal("host", file)


@pytest.mark.parametrize("name", declared_functions())
def test_a_missing_function(tmp_path, name):
    file = stand_in(tmp_path / "library.so", without=[name])
    assert refusal("host", file) == (
        f"{file}: has no function {name}, so it is not an expert cache library of ABI version "
        f"{native.ABI_VERSION}; {REMEDY}"
    )


def test_the_library_of_another_backend(tmp_path):
    file = stand_in(tmp_path / "library.so", backend="cuda")
    assert refusal("host", file) == (
        f"{file}: is a cuda library, but this device needs a host one; {REMEDY}"
    )


def test_hip_without_its_runtime(tmp_path):
    file = stand_in(tmp_path / "library.so", backend="hip")
    assert refusal("hip", file) == (
        f"{file}: needs libamdhip64, which this process has not loaded; "
        "import a ROCm build of torch first"
    )


def test_hip_with_a_runtime_that_was_loaded_privately(tmp_path):
    """As torch brings it: RTLD_LOCAL, so that the library alone could not see its symbols."""
    runtime = compile_c(
        tmp_path / "libamdhip64.so.7",
        'extern "C" int runtime_function() { return 5; }',
        "-shared", "-fPIC",
    )  # fmt: skip
    functions = "\n".join(f"int {name}() {{ return 1; }}" for name in declared_functions()[4:])
    library = compile_c(
        tmp_path / "library.so",
        f"""extern "C" {{
        int runtime_function();
        int started = runtime_function();
        int expert_cache_abi_version() {{ return {native.ABI_VERSION}; }}
        const char *expert_cache_backend() {{ return "hip"; }}
        const char *expert_cache_architectures() {{ return "gfx90a gfx942"; }}
        const char *expert_cache_error_string(int) {{ return "text"; }}
        {functions}
        }}""",
        "-shared", "-fPIC",
    )  # fmt: skip
    code = (
        "import ctypes, sys\n"
        "from expert_cache_shim.native import load\n"
        "runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL)\n"
        "library = load('hip', sys.argv[2])\n"
        "print(library.architectures, ctypes.c_int.in_dll(library._handle, 'started').value)\n"
    )
    command = [sys.executable, "-c", code, str(runtime), str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "('gfx90a', 'gfx942') 5\n", done.stderr


# Architectures


@pytest.mark.parametrize("built, found, runs", [
    ("gfx90a gfx942", "gfx942:sramecc+:xnack-", True),
    ("gfx90a gfx942", "gfx90a", True),
    ("gfx90a gfx942", "gfx940", False),
    ("gfx90a", "gfx90c", False),
    ("sm_80 sm_90", "sm_90", True),
    ("sm_80", "sm_86", True),
    ("sm_90", "sm_100", True),
    ("sm_90", "sm_89", False),
    ("sm_100", "sm_90", False),
    ("gfx90a", "sm_90", False),
])  # fmt: skip
def test_whether_the_code_runs_on_a_device(host_library, monkeypatch, built, found, runs):
    monkeypatch.setattr(host_library, "backend", "hip" if "gfx" in built else "cuda")
    monkeypatch.setattr(host_library, "architectures", tuple(built.split()))
    if runs:
        host_library.check_architecture(found)
    else:
        with pytest.raises(LibraryError):
            host_library.check_architecture(found)


def test_code_for_another_device_is_refused_with_the_command_that_builds_it(
    host_library, monkeypatch
):
    monkeypatch.setattr(host_library, "backend", "hip")
    monkeypatch.setattr(host_library, "architectures", ("gfx90a", "gfx942"))
    with pytest.raises(LibraryError) as error:
        host_library.check_architecture("gfx1100:xnack-")
    assert str(error.value) == (
        f"{host_library.path}: has no code for this GPU, gfx1100; it was built for gfx90a gfx942; "
        f"run `EXPERT_CACHE_ARCHS=gfx1100 make -C {ROOT} hip`"
    )


def test_the_host_library_runs_wherever_it_loads(host_library):
    host_library.check_architecture("any")


# The C header


def test_structures_lie_in_memory_as_the_header_says(tmp_path):
    lines, expected = [], []
    for structure in (Manage, Tensor, Gather):
        name = f"ExpertCache{structure.__name__}"
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, _ in structure._fields_:
            size = f"sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
            place = getattr(structure, field)
            expected.append(f"{field} {place.offset} {place.size}")
    assert c_output(tmp_path, lines) == expected


def test_numbers_are_those_of_the_header(tmp_path):
    numbers = {
        "ABI_VERSION": native.ABI_VERSION,
        "MAX_EXPERTS": policy.MAX_EXPERTS,
        "MAX_IDS": policy.MAX_IDS,
        "STATE_HEADER": native.STATE_HEADER,
        "STATE_WORDS(7)": native.state_words(7),
        "INT32": native.INT32,
        "INT64": native.INT64,
        "UINT32": native.UINT32,
        "COUNTERS": len(policy.COUNTERS),
        **{name.upper(): code for name, code in policy.CODES.items()},
        **{name.upper(): code for name, code in policy.MODES.items()},
        **{name.upper(): index for index, name in enumerate(policy.COUNTERS)},
    }
    lines = [f'printf("%d\\n", EXPERT_CACHE_{name});' for name in numbers]
    assert c_output(tmp_path, lines) == [str(number) for number in numbers.values()]


def test_every_declared_function_is_bound():
    assert list(native.FUNCTIONS) == declared_functions()


def c_output(folder, statements):
    source = '#include "expert_cache.h"\n#include <cstddef>\n#include <cstdio>\nint main() {\n'
    program = compile_c(folder / "program", source + "\n".join(statements) + "\n}")
    return subprocess.run([os.fspath(program)], capture_output=True, text=True).stdout.split("\n")[
        :-1
    ]
