"""`expert-cache doctor`: silent or green where all is well, and the one right line where not."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import hip_stand_in
import pytest
from command_line import Image, make_image, put_torch
from documents import Document
from start_up import ROOT
from test_native import compile_c, declared_functions, stand_in

from expert_cache_shim.native import ABI_VERSION

GPU = """
class version: hip = None
class cuda:
    is_available = lambda: True
    device_count = lambda: 1
    def get_device_properties(index):
        class gpu: name, total_memory, major, minor = "a GPU", 2**37, 8, 0
        return gpu
"""


@pytest.fixture
def image(tmp_path) -> Image:
    return make_image(tmp_path).enable()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Image:
    """One that no test changes."""
    return make_image(tmp_path_factory.mktemp("whole")).enable()


@pytest.fixture(scope="module")
def with_gpu(tmp_path_factory) -> Image:
    """One in which PyTorch sees a GPU, and nothing built the kernels; no test changes it."""
    image = make_image(tmp_path_factory.mktemp("gpu")).enable()
    put_torch(image.python, GPU, cuda="13.0")
    return image


def checks(image: Image, *words: str, **environ: str) -> dict[str, list[dict]]:
    """What `doctor --json` says, by the name of the check; its status agrees."""
    environ.setdefault("EXPERT_CACHE_SNAPSHOT", "off")
    outcome = image.call("doctor", "--json", *words, **environ)
    assert outcome.err == ""
    report = json.loads(outcome.out)
    assert outcome.status == int(not report["passed"])
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert report["passed"] == (not failed)
    found: dict[str, list[dict]] = {}
    for check in report["checks"]:
        found.setdefault(check["name"], []).append(check)
    return found


def failure(image: Image, name: str, *words: str, **environ: str) -> tuple[str, str]:
    """The only check that fails: its finding and its remedy."""
    found = checks(image, *words, **environ)
    failed = [check for group in found.values() for check in group if check["status"] == "fail"]
    assert [check["name"] for check in failed] == [name], failed
    return failed[0]["found"], failed[0]["remedy"]


# --- Where all is well ---


def test_an_image_that_is_whole_is_nothing_to_speak_of(whole):
    outcome = whole.call("doctor", "--build")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")


def test_a_machine_without_gpu_pytorch_and_vllm_is_described(whole):
    found = checks(whole)
    status = {name: {check["status"] for check in group} for name, group in found.items()}
    good = "python", "files", "imports", "start", "settings", "kernels"
    assert {name: status[name] for name in good} == {name: {"ok"} for name in good}
    assert status["gpu"] == status["vllm"] == {"warn"}
    assert found["start"][0]["found"] == f"starts with Python by {whole.hook}"
    (hip,) = [c["found"] for c in found["kernels"] if "libexpertcache_hip.so" in c["found"]]
    assert hip == (
        "libexpertcache_hip.so: whole, gfx1201 gfx90a gfx942, checksum matches, not needed here"
    )


def test_nothing_is_left_behind(whole, tmp_path):
    folder = tmp_path / "new" / "counters"
    found = checks(whole, EXPERT_CACHE_SNAPSHOT=str(folder))
    assert found["counters"][0]["status"] == "warn"  # no numpy here
    assert not folder.parent.exists()


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """The screen in this environment, by the checkout's own sitecustomize."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    in_memory = os.access("/dev/shm", os.W_OK)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else None) as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_CACHE_")}
        environ |= {
            "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "500",
            "EXPERT_CACHE_FRACTION": "0.25", "EXPERT_CACHE_SLOT": "1",
            "EXPERT_CACHE_SNAPSHOT": f"{folder}/new/counters",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "expert_cache_shim", "doctor"],
            env=environ, cwd="/", capture_output=True, text=True,
        )  # fmt: skip
        assert os.listdir(folder) == []
    assert done.stderr == "" and done.returncode == int("\nfail " in done.stdout)
    return done.stdout


@pytest.mark.parametrize("line", [
    f"ok    start          starts with Python by PYTHONPATH ({ROOT})",
    "warn  settings       'EXPERT_CACHE_SLOT' is not a variable of the expert cache and is ignored",
    "                     -> did you mean EXPERT_CACHE_SLOTS?",
])  # fmt: skip
def test_a_screen_has(with_torch, line):
    assert line in with_torch.splitlines()


def test_a_screen_has_the_settings_that_are_not_defaults(with_torch):
    assert "ok    settings       EXPERT_CACHE_FRACTION=0.25, EXPERT_CACHE_SNAPSHOT=/" in with_torch


def test_counters_are_really_written(with_torch):
    assert "/new/counters: can be written" in with_torch


def test_memory_is_really_aliased_by_the_library_for_the_cpu(host_library_path, with_torch):
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is for a GPU")
    assert f"{host_library_path}: host, ABI version" in with_torch
    assert "ok    virtual memory one memory was read through two ranges" in with_torch


def test_what_is_checked_is_what_the_page_explains(whole):
    rows = Document(ROOT / "docs" / "command-line.md").rows
    start = rows.index(["line", "what is done", "warns or fails"]) + 2
    explained = {row[0] for row in itertools.takewhile(lambda row: len(row) == 3, rows[start:])}
    only_where_it_can_be = {"virtual memory", "link", "offload", "arguments"}
    assert explained - only_where_it_can_be == checks(whole).keys() - only_where_it_can_be
    assert only_where_it_can_be < explained


# --- The shim and its start ---


def test_a_module_that_is_missing(image):
    (image.package / "policy.py").unlink()
    found, remedy = failure(image, "files", "--build")
    assert found.startswith(f"{image.package}/policy.py: is missing, ")
    assert remedy == "copy or install the package again"


def test_a_module_that_is_damaged(image):
    module = image.package / "budget.py"
    module.write_text(module.read_text()[:-200] + "(")
    found, _ = failure(image, "files", "--build")
    assert found.startswith(f"{module}: is damaged: ")


def test_wrapt_that_is_missing(image):
    shutil.rmtree(image.python.site_packages / "wrapt")
    assert failure(image, "imports", "--build") == (
        "the package wrapt is missing", "pip install wrapt",
    )  # fmt: skip


@pytest.mark.parametrize("words", [[], ["--build"]])
def test_a_shim_that_nothing_starts(image, words):
    image.hook.unlink()
    found, remedy = failure(image, "start", *words)
    assert found == (
        "the shim does not start with Python: no expert_cache_shim.pth in "
        f"{image.python.site_packages}, and nothing of it on PYTHONPATH"
    )
    assert remedy == f"run `{image.typed('enable')}`"


def test_a_pth_whose_package_is_elsewhere(image):
    image.hook.write_text(image.hook.read_text().replace(str(image.folder), "/no/such/folder"))
    found, remedy = failure(image, "start")
    assert found.endswith(f"{image.hook} is there, but the package it starts is not")
    assert remedy == f"run `{image.typed('disable')}`, then `{image.typed('enable')}`"


def test_pythonpath_that_another_sitecustomize_comes_before(image, tmp_path):
    image.hook.unlink()
    shutil.copy(ROOT / "sitecustomize.py", image.folder)
    found = checks(image, PYTHONPATH=str(image.folder))
    assert found["start"][0]["found"] == f"starts with Python by PYTHONPATH ({image.folder})"

    other = tmp_path / "vendor" / "sitecustomize.py"
    other.parent.mkdir()
    other.write_text("")
    path = os.pathsep.join([str(other.parent), str(image.folder)])
    found, remedy = failure(image, "start", PYTHONPATH=path)
    assert found.endswith(f"{other} comes before that of {image.folder}")
    assert remedy.startswith(f"put {image.folder} first, or run ")


@pytest.mark.parametrize("flag, said", [
    ("-E", "-E and -I skip PYTHONPATH"), ("-S", "-S skips .pth files and sitecustomize"),
])  # fmt: skip
def test_flags_of_python_that_skip_it(image, flag, said):
    image.hook.unlink()
    shutil.copy(ROOT / "sitecustomize.py", image.folder)
    outcome = image.python.run(
        flag, "-m", "expert_cache_shim", "doctor", cwd=image.folder,
        path=[image.folder], COLUMNS="500", EXPERT_CACHE_SNAPSHOT="off",
    )  # fmt: skip
    assert outcome.status == 1
    assert f"fail  start          the shim does not start with Python: {said}\n" in outcome.out


def test_a_shim_that_is_switched_off(whole):
    (start,) = checks(whole, EXPERT_CACHE_DISABLE="1")["start"]
    assert (start["status"], start["remedy"]) == ("warn", "unset EXPERT_CACHE_DISABLE")


def test_a_setting_that_is_not_allowed(whole):
    found, remedy = failure(whole, "settings", EXPERT_CACHE_POLICY="best")
    assert found.startswith("EXPERT_CACHE_POLICY='best': allowed is one of lrfu, ")
    assert remedy == "correct it; the cache is off until then"


@pytest.mark.parametrize("words", [[], ["--build"]])
def test_a_pytorch_that_cannot_be_imported(image, words):
    put_torch(image.python, "raise ImportError('libc10.so: cannot open')", hip="6.4")
    (gpu,) = checks(image, *words)["gpu"]
    assert gpu["status"] == "fail"
    assert gpu["found"] == "PyTorch cannot be imported: libc10.so: cannot open"


# --- The kernel library ---


def test_the_library_for_amd_loads_in_an_image_with_rocm_and_no_gpu(image, tmp_path):
    """The committed object, and a stand-in for the runtime that PyTorch loads privately."""
    torch_like = hip_stand_in.build(tmp_path) / hip_stand_in.TORCH_LIKE
    code = (
        f"import ctypes; ctypes.CDLL({str(torch_like)!r})\n"
        "class version: hip = '6.4'\n"
        "class cuda: is_available = lambda: False\n"
    )
    put_torch(image.python, code, hip="6.4")
    outcome = image.call("doctor", "--build")
    # The stand-in for PyTorch lacks what `arming` imports of it; nothing else is wrong.
    assert [line.split()[:2] for line in outcome.out.splitlines() if line[0] != " "] == [
        ["fail", "imports"]
    ]
    kernels = checks(image)["kernels"][0]
    library = image.package / "lib" / "libexpertcache_hip.so"
    assert (kernels["status"], kernels["found"]) == (
        "ok",
        f"{library}: hip, ABI version {ABI_VERSION}, gfx90a gfx942 gfx1201, checksum matches",
    )


def test_a_truncated_library(image):
    library = image.package / "lib" / "libexpertcache_hip.so"
    library.write_bytes(library.read_bytes()[:50_000])
    found, remedy = failure(image, "kernels", "--build")
    assert found.startswith(f"{library}: is truncated, 50000 of at least ")
    assert remedy == f"run `{image.typed('build')}`"


def test_a_library_of_which_one_bit_differs(image):
    library = image.package / "lib" / "libexpertcache_hip.so"
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    found, _ = failure(image, "kernels", "--build")
    assert found == f"{library}: differs from the checksum in libexpertcache_hip.so.sha256"


def test_the_library_that_a_gpu_needs_is_not_there(with_gpu):
    library = with_gpu.package / "lib" / "libexpertcache_cuda.so"
    found = checks(with_gpu)
    (kernels,) = [check for check in found["kernels"] if check["status"] == "fail"]
    assert kernels["found"] == f"{library}: No such file or directory"
    assert kernels["remedy"] == f"run `{with_gpu.typed('build')}`"
    assert found["gpu"][0]["found"] == "1 x a GPU, sm_80, 128 GiB (torch 2.99)"


DEADLY = "#include <cstdlib>\n__attribute__((constructor)) static void die() { abort(); }"


def wrong(folder: Path, kind: str) -> str:
    """A library for CUDA that cannot be used."""
    file = folder / "kernels.so"
    if kind == "architecture":
        stand_in(file, backend="cuda")  # has code for the architecture "x"
    elif kind == "abi":
        stand_in(file, backend="cuda", abi=7)
    elif kind == "backend":
        stand_in(file, backend="host")
    elif kind == "deadly":
        functions = "".join(f"int {name}() {{ return 0; }}" for name in declared_functions())
        compile_c(file, f'{DEADLY} extern "C" {{ {functions} }}', "-shared", "-fPIC")
    return str(file)


@pytest.mark.parametrize("kind, said, remedy", [
    ("missing", "No such file or directory", "build`"),
    ("architecture", "has no code for this GPU, sm_80; it was built for x", "build --arch sm_80`"),
    ("abi", f"has ABI version 7, but this package needs {ABI_VERSION}", "build`"),
    ("backend", "is a host library, but this device needs a cuda one", "build`"),
    ("deadly", "the process ended in it: killed by SIGABRT", "build`"),
])  # fmt: skip
def test_a_library_that_does_not_fit(with_gpu, tmp_path, kind, said, remedy):
    library = wrong(tmp_path, kind)
    found = checks(with_gpu, EXPERT_CACHE_LIB=library)
    (kernels,) = [check for check in found["kernels"] if check["status"] == "fail"]
    assert kernels["found"] == f"{library}: {said}"
    assert kernels["remedy"].endswith(f"{remedy} and unset EXPERT_CACHE_LIB")
