"""The start of the shim in real interpreters: when it acts, how often, what it costs.

"registered" in an output is the shim's hooks being registered, "vllm" a package of that name being
imported.
"""

from pathlib import Path

import pytest
import wrapt
from bootstrap_matrix import VERSIONS
from start_up import (
    CURRENT,
    Interpreter,
    make_venv,
    put_shim,
    put_shim_for_pythonpath,
    put_shim_in_site_packages,
    put_vllm,
)

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


# --- how often it starts; bootstrap_matrix.py has the ways in which it does ---


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


# --- reload, threads ---


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
