"""The start of the shim in real interpreters: when it acts, how often, what it costs.

"registered" in an output is the shim's hooks being registered, "vllm" a package of that name being
imported.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wrapt
from start_up import (
    CURRENT,
    Interpreter,
    make_venv,
    put_shim,
    put_shim_for_pythonpath,
    put_shim_in_site_packages,
    put_vllm,
)

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
WATCHES = "[type(finder).__name__ for finder in sys.meta_path].count('VllmWatch')"


@pytest.fixture(scope="session", params=VERSIONS)
def any_version(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def bare_any(any_version, tmp_path_factory) -> Interpreter:
    return make_venv(any_version, tmp_path_factory.mktemp("bare"), "--without-pip")


@pytest.fixture(scope="session")
def installed_any(any_version, tmp_path_factory) -> Interpreter:
    folder = tmp_path_factory.mktemp("installed")
    return put_shim_in_site_packages(make_venv(any_version, folder, "--without-pip"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> Interpreter:
    return make_venv(CURRENT, tmp_path_factory.mktemp("bare"), "--without-pip")


@pytest.fixture
def installed(tmp_path) -> Interpreter:
    return put_shim_in_site_packages(make_venv(CURRENT, tmp_path / "venv", "--without-pip"))


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    return put_shim_for_pythonpath(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory) -> Path:
    return put_vllm(tmp_path_factory.mktemp("vllm"))


# --- which ways of starting Python it works in ---

# flag: does the shim start from a .pth in site-packages, does it from PYTHONPATH
MATRIX = {
    "": (True, True),
    "-s": (True, True),
    "-P": (True, True),
    "-B": (True, True),
    "-E": (True, False),
    "-I": (True, False),
    "-S": (False, False),
}


@pytest.mark.parametrize("flag", MATRIX)
def test_each_interpreter_flag_starts_the_shim_or_does_not(
    flag, any_version, installed_any, bare_any, shim, vllm
):
    if flag == "-P" and any_version == "3.10":
        pytest.skip("-P is new in Python 3.11")
    flags = [flag] if flag else []
    by_hook, by_path = MATRIX[flag]
    code = f"import sys; sys.path.append({str(vllm)!r}); import vllm"
    expected = {True: "registered\nvllm", False: "vllm"}
    assert installed_any.says(code, *flags) == expected[by_hook]
    assert bare_any.says(code, *flags, path=[shim]) == expected[by_path]


def uv() -> str:
    """uv, beside this Python or on PATH; skips the test where there is none."""
    found = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    return found or pytest.skip("uv is not installed (pip install uv)")


def uv_says(code: str, python: Interpreter, cache: Path, **environ: str) -> str:
    """What `code` prints under `uv run`, in the environment of `python`."""
    command = [uv(), "run", "--no-project", "--offline", "--python", python.executable]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cache), **environ}
    done = subprocess.run(
        [*command, "python", "-c", code], env=environ, cwd=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_uv_run_starts_the_shim_both_ways(installed, bare, shim, vllm, tmp_path):
    code = f"import sys; sys.path.append({str(vllm)!r}); import vllm"
    assert uv_says(code, installed, tmp_path) == "registered\nvllm"
    assert uv_says(code, bare, tmp_path) == "vllm"
    assert uv_says(code, bare, tmp_path, PYTHONPATH=str(shim)) == "registered\nvllm"


def test_a_venv_that_runs_the_pth_twice_gets_one_watch(installed_any, vllm):
    # The witness shows that this Python still does run every .pth of a venv twice.
    witness = installed_any.site_packages / "witness.pth"
    witness.write_text("import sys; sys.seen = getattr(sys, 'seen', 0) + 1\n")
    seen, watches = installed_any.says(f"import sys; print(sys.seen, {WATCHES})").split()
    witness.unlink()
    assert seen == "2" and watches == "1"
    assert installed_any.says("import vllm", path=[vllm]) == "registered\nvllm"


def test_the_second_run_of_the_pth_does_nothing(installed):
    (installed.site_packages / "expert_cache_shim" / "bootstrap.py").write_text(
        "def install(): print('install')"
    )
    assert installed.says("") == "install"


def test_a_venv_that_sees_system_packages_takes_the_pth_of_its_own(tmp_path, vllm):
    python = make_venv(CURRENT, tmp_path, "--without-pip", "--system-site-packages")
    put_shim_in_site_packages(python)
    assert python.says(f"import sys; print({WATCHES})") == "1"
    assert python.says("import vllm", path=[vllm]) == "registered\nvllm"


def test_installed_and_on_pythonpath_at_once_is_one_watch(installed, shim, vllm):
    assert installed.says(f"import sys; print({WATCHES})", path=[shim]) == "1"
    assert installed.says("import vllm", path=[shim, vllm]) == "registered\nvllm"


# --- what it costs a Python that never imports vLLM ---

LOADED = "import sys; print(*sorted(sys.modules))"
OURS = {"expert_cache_shim", "expert_cache_shim.bootstrap"}


def test_start_up_loads_two_modules_of_ours_and_no_other(installed_any, bare_any):
    # A .pth in itself makes newer Pythons load a codec: that is what the empty one is for.
    empty = bare_any.site_packages / "empty.pth"
    empty.write_text("import sys\n")
    before = set(bare_any.says(LOADED).split())
    empty.unlink()
    assert set(installed_any.says(LOADED).split()) - before == OURS


def test_start_up_from_pythonpath_loads_three_modules_of_ours_and_no_other(bare_any, shim):
    before = set(bare_any.says(LOADED).split())
    assert set(bare_any.says(LOADED, path=[shim]).split()) - before == {*OURS, "sitecustomize"}


def test_a_shadowed_sitecustomize_costs_no_other_module(bare_any, shim, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    before = set(bare_any.says(LOADED, path=[tmp_path]).split())
    assert set(bare_any.says(LOADED, path=[shim, tmp_path]).split()) - before == OURS


# --- when the hooks are registered ---


def test_nothing_is_registered_until_vllm_is_imported(bare, shim, vllm):
    code = "import json, xml; print('before'); import vllm; import vllm.model_executor"
    assert bare.says(code, path=[shim, vllm]) == "before\nregistered\nvllm"


def test_a_module_whose_name_only_resembles_vllm_does_not_count(bare, shim, tmp_path):
    for name in ("vllm_ascend", "my_vllm"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "vllm.py").write_text("")
    code = f"import sys, vllm_ascend, my_vllm, package.vllm; print({WATCHES})"
    assert bare.says(code, path=[shim, tmp_path]) == "1"


def test_the_watch_is_gone_once_vllm_is_imported(bare, shim, vllm):
    code = f"import sys; print({WATCHES}); import vllm; print({WATCHES})"
    assert bare.says(code, path=[shim, vllm]) == "1\nregistered\nvllm\n0"


def test_a_submodule_imported_first_counts_as_vllm(bare, shim, vllm):
    code = "import vllm.model_executor.model_loader.utils"
    assert bare.says(code, path=[shim, vllm]) == "registered\nvllm\nutils"
    outcome = bare.run("-m", "vllm.model_executor.model_loader.utils", path=[shim, vllm])
    assert (outcome.err, outcome.out) == ("", "registered\nvllm\nutils\n")


def test_vllm_imported_before_the_shim_registers_at_once(bare, shim, vllm):
    code = "import vllm; from expert_cache_shim import bootstrap; bootstrap.install(); print('end')"
    assert bare.says(code, "-S", path=[shim, vllm]) == "vllm\nregistered\nend"


def test_looking_for_vllm_without_importing_it_registers_once(bare, shim, vllm):
    code = "from importlib.util import find_spec; find_spec('vllm'); print('found'); import vllm"
    assert bare.says(code, path=[shim, vllm]) == "registered\nfound\nvllm"


def test_a_vllm_that_is_not_there_fails_as_it_would_without_the_shim(bare, shim):
    code = "import vllm"
    without, with_shim = bare.run("-c", code), bare.run("-c", code, path=[shim])
    assert with_shim == without.__class__(1, "registered\n", without.err)
    assert "No module named 'vllm'" in without.err


def test_the_finder_after_the_watch_is_still_asked_for_vllm(bare, shim, vllm):
    code = """
import sys
class Witness:
    def find_spec(self, name, path=None, target=None):
        if "vllm" in name: print("asked for", name)
sys.meta_path.insert(1, Witness())
import vllm
"""
    assert bare.says(code, path=[shim, vllm]) == "registered\nasked for vllm\nvllm"


def test_a_walk_over_the_finders_in_another_thread_skips_none(bare, shim, vllm):
    code = """
import sys
walk = iter(sys.meta_path)
seen = [next(walk), next(walk)]
expected = list(sys.meta_path)
import vllm
print([*seen, *walk] == expected)
"""
    assert bare.says(code, path=[shim, vllm]) == "registered\nvllm\nTrue"


def test_real_wrapt_hooks_fire_once_for_a_module_imported_later(bare, vllm, tmp_path):
    hooks = """
import wrapt
def register():
    name = "vllm.model_executor.model_loader.utils"
    wrapt.register_post_import_hook(lambda module: print("hooked", module.__name__), name)
"""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wrapt").symlink_to(Path(wrapt.__file__).parent)
    shim = put_shim_for_pythonpath(tmp_path / "shim", hooks)
    code = """
import sys
print("wrapt" in sys.modules)
import vllm.model_executor.model_loader.utils
"""
    assert bare.says(code, path=[shim, vllm, packages]).splitlines() == [
        "False",
        "vllm",
        "utils",
        "hooked vllm.model_executor.model_loader.utils",
    ]


# --- reload, threads, processes ---


def test_a_reloaded_bootstrap_remembers_that_it_is_installed(bare, shim, vllm):
    code = f"""
import importlib, sys
from expert_cache_shim import bootstrap
importlib.reload(bootstrap).install()
print({WATCHES})
import vllm
importlib.reload(bootstrap).install()
print({WATCHES})
"""
    assert bare.says(code, path=[shim, vllm]) == "1\nregistered\nvllm\n0"


def test_many_threads_that_import_vllm_register_once(bare, shim, vllm):
    code = """
import importlib.util, threading
start = threading.Barrier(16)
def use(probe):
    start.wait()
    if probe: importlib.util.find_spec("vllm")
    import vllm
threads = [threading.Thread(target=use, args=[i % 2]) for i in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    assert sorted(bare.says(code, path=[shim, vllm]).split()) == ["registered", "vllm"]


def test_a_thread_that_still_walks_the_old_finders_does_not_register_again(bare, shim, vllm):
    code = """
import sys
watch = sys.meta_path[0]
import vllm
print(watch.find_spec("vllm"))
"""
    assert bare.says(code, path=[shim, vllm]) == "registered\nvllm\nNone"


def test_a_forked_child_has_its_own_watch(bare, shim, vllm):
    code = """
import os, sys
if os.fork() == 0:
    import vllm
    sys.stdout.flush()
    os._exit(0)
os.wait()
print("parent", "vllm" in sys.modules, flush=True)
import vllm
"""
    expected = "registered\nvllm\nparent False\nregistered\nvllm"
    assert bare.says(code, path=[shim, vllm]) == expected


@pytest.mark.parametrize("flags", [[], ["-I"]], ids=["plain", "isolated"])
def test_a_spawned_child_starts_the_shim_itself(flags, installed, vllm, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        f"""
import multiprocessing, sys
sys.path.append({str(vllm)!r})
def child():
    import vllm
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode, "vllm" in sys.modules)
"""
    )
    outcome = installed.run(*flags, str(script))
    assert (outcome.err, outcome.out) == ("", "registered\nvllm\n0 False\n")


# --- off ---


@pytest.mark.parametrize("value", ["1", " 1 "])
def test_disabled_it_is_inert(value, installed, shim, vllm):
    code = f"""
import sys
print({WATCHES})
import vllm
print("expert_cache_shim.hooks" in sys.modules)
"""
    for path in ([vllm], [shim, vllm]):
        assert installed.says(code, path=path, EXPERT_CACHE_DISABLE=value) == "0\nvllm\nFalse"


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_any_other_value_of_disable_is_left_to_the_settings(value, bare, shim, vllm):
    outcome = bare.says("import vllm", path=[shim, vllm], EXPERT_CACHE_DISABLE=value)
    assert outcome == "registered\nvllm"


def test_the_start_up_half_needs_nothing_but_itself(bare, tmp_path):
    # put_shim copies two modules of the package: that they suffice is what keeps start-up cheap.
    put_shim(tmp_path)
    code = "from expert_cache_shim import bootstrap; bootstrap.install(); print('ok')"
    assert bare.says(code, path=[tmp_path]) == "ok"
