"""The sitecustomize of ours and those it hides: with ours first, each behaves as if it were not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from start_up import (
    CURRENT,
    Interpreter,
    find_python,
    make_venv,
    put_shim_for_pythonpath,
    put_shim_in_site_packages,
    put_vllm,
)

# Says where it is and whether it can see itself, as a vendor's tracer may need to.
WITNESS = """
import sys
me = sys.modules["sitecustomize"]
print("witness", me.__file__ == __file__, me.__spec__.origin == __file__, me.__name__)
mark = "mine"
"""


@pytest.fixture(scope="module", params=["3.10", "3.11", "3.12", "3.13", "3.14"])
def python(request, tmp_path_factory) -> Interpreter:
    return make_venv(request.param, tmp_path_factory.mktemp("venv"), "--without-pip")


@pytest.fixture(scope="module")
def current(tmp_path_factory) -> Interpreter:
    return make_venv(CURRENT, tmp_path_factory.mktemp("venv"), "--without-pip")


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    return put_shim_for_pythonpath(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Path:
    return put_vllm(tmp_path_factory.mktemp("vllm"))


def put_other(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return folder


# --- the one that ours hides ---

OTHERS = {
    "fine": WITNESS,
    "replaces itself": "import sys, types; sys.modules[__name__] = types.SimpleNamespace(mark=7)",
    "appends to sys.path": "import sys; sys.path.append('/somewhere'); print(len(sys.path) > 1)",
    "raises": "raise ValueError('of its own')",
    "lacks a module": "import no_such_module",
    "lacks itself": "raise ImportError('no', name='sitecustomize')",
    "does not compile": "def f(:",
    "exits": "import sys; print('out'); sys.exit(3)",
    "exits hard": "import os; os._exit(4)",
}


def without_frames(error: str) -> str:
    """A traceback less its frames, of which ours add one that names this file."""
    lines = [line for line in error.splitlines() if not line.startswith("  ")]
    return "\n".join(lines)


@pytest.mark.parametrize("other", OTHERS)
def test_a_hidden_one_behaves_as_python_would_without_ours(other, python, shim, tmp_path):
    put_other(tmp_path, OTHERS[other])
    code = (
        "import sys; me = sys.modules.get('sitecustomize'); "
        "print(getattr(me, '__file__', 0), getattr(me, 'mark', 0))"
    )
    without = python.run("-c", code, path=[tmp_path])
    hidden = python.run("-c", code, path=[shim, tmp_path])
    assert (hidden.status, hidden.out) == (without.status, without.out)
    assert without_frames(hidden.err) == without_frames(without.err)
    if other in ("raises", "lacks a module", "does not compile"):
        assert without.err != ""


@pytest.mark.parametrize("other", ["fine", "raises", "lacks itself"])
def test_whatever_the_hidden_one_does_ours_has_started(other, python, shim, vllm, tmp_path):
    put_other(tmp_path, OTHERS[other])
    outcome = python.run("-c", "import vllm", path=[shim, tmp_path, vllm])
    assert outcome.out.endswith("registered\nvllm\n")


def test_a_hidden_one_in_site_packages_is_run(tmp_path, shim):
    python = make_venv(CURRENT, tmp_path, "--without-pip")
    put_other(python.site_packages, WITNESS)
    assert python.says("", path=[shim]) == "witness True True sitecustomize"


def test_a_hidden_package_is_run(current, shim, tmp_path):
    put_other(tmp_path / "sitecustomize", "").joinpath("sitecustomize.py").unlink()
    (tmp_path / "sitecustomize" / "__init__.py").write_text(WITNESS)
    assert current.says("", path=[shim, tmp_path]) == "witness True True sitecustomize"


def test_a_hidden_folder_without_code_is_nothing(current, shim, tmp_path):
    (tmp_path / "sitecustomize").mkdir()
    code = "import sitecustomize; print(sitecustomize.__file__)"
    assert current.says(code, path=[shim, tmp_path]) == str(shim / "sitecustomize.py")


def test_with_none_hidden_ours_stays_in_place(current, shim):
    code = "import sitecustomize; print(sitecustomize.__file__)"
    assert current.says(code, path=[shim]) == str(shim / "sitecustomize.py")


def test_only_the_next_one_is_run_as_python_would(current, shim, tmp_path):
    first = put_other(tmp_path / "first", "print('first')")
    second = put_other(tmp_path / "second", "print('second')")
    assert current.says("", path=[shim, first, second]) == "first"


# --- one that hides ours ---


def test_ours_is_not_run_behind_another_but_a_pth_is(tmp_path, shim, vllm):
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    other = put_other(tmp_path / "other", "print('other')")
    assert python.says("import vllm", path=[other, shim, vllm]) == "other\nvllm"
    put_shim_in_site_packages(python)
    assert python.says("import vllm", path=[other, vllm]) == "other\nregistered\nvllm"


# --- odd entries on PYTHONPATH ---


def test_odd_spellings_of_the_folder_work(current, shim, vllm, tmp_path):
    other = put_other(tmp_path / "other", "print('other')")
    link = tmp_path / "link"
    link.symlink_to(shim)
    spellings = [
        [f"{shim}/"],
        [f"{shim}//"],
        [os.path.relpath(shim, tmp_path)],
        [f"{shim.parent}/./{shim.name}/../{shim.name}"],
        [link],
        [shim, shim],
        [shim, link],
        [link, shim, f"{shim}/"],
        ["/no/such/folder", shim],
        ["", shim],
    ]
    for spelling in spellings:
        said = current.says("import vllm", path=[*spelling, other, vllm], cwd=tmp_path)
        assert said == "other\nregistered\nvllm", spelling


def test_the_current_folder_as_an_empty_entry_works(current, shim, vllm):
    assert current.says("import vllm", path=["", vllm], cwd=shim) == "registered\nvllm"


def test_a_folder_that_was_removed_is_nothing(current, tmp_path):
    assert current.says("print('up')", path=[tmp_path / "removed"]) == "up"


def test_a_zip_file_works(current, shim, vllm, tmp_path):
    other = put_other(tmp_path / "other", WITNESS)
    archive = shutil.make_archive(tmp_path / "shim", "zip", shim)
    said = current.says("import vllm", path=[archive, other, vllm])
    assert said == "witness True True sitecustomize\nregistered\nvllm"


@pytest.mark.parametrize("order", ["ab", "aba", "aab", "abab", "abcabc"])
def test_copies_of_ours_on_one_path_end_at_the_one_they_hide(order, current, vllm, tmp_path):
    folders = {name: put_shim_for_pythonpath(tmp_path / name) for name in set(order)}
    for position, name in enumerate(order):
        (tmp_path / f"{position}").symlink_to(folders[name])
    other = put_other(tmp_path / "other", WITNESS)
    path = [*(tmp_path / f"{position}" for position in range(len(order))), other, vllm]
    expected = "witness True True sitecustomize\nregistered\nvllm"
    assert current.says("import vllm", path=path) == expected


def test_a_path_that_names_a_folder_twice_at_start_up_is_no_loop(current, vllm, tmp_path):
    # Python itself drops repeated entries; a .pth can bring one back.
    a, b = (put_shim_for_pythonpath(tmp_path / name) for name in "ab")
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    (python.site_packages / "again.pth").write_text(f"import sys; sys.path.append({str(a)!r})\n")
    assert python.says("import vllm", path=[a, b, vllm]) == "registered\nvllm"


def test_a_relative_entry_that_a_pth_put_first_is_no_loop(vllm, tmp_path):
    put_shim_for_pythonpath(tmp_path / "shim")
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    (python.site_packages / "first.pth").write_text("import sys; sys.path.insert(0, 'shim')\n")
    said = python.says("import vllm", path=[vllm], cwd=tmp_path)
    assert said == "registered\nvllm"


# --- failures of ours ---


@pytest.mark.parametrize("broken", ["package missing", "does not compile", "install raises"])
def test_a_failure_of_ours_is_one_line_and_the_hidden_one_is_run(broken, python, tmp_path):
    shim = put_shim_for_pythonpath(tmp_path / "shim")
    bootstrap = shim / "expert_cache_shim" / "bootstrap.py"
    if broken == "package missing":
        shutil.rmtree(bootstrap.parent)
    elif broken == "does not compile":
        bootstrap.write_text("def install(:")
    else:
        bootstrap.write_text("def install(): raise OSError('first\\nsecond')")
    other = put_other(tmp_path / "other", WITNESS)
    outcome = python.run("-c", "print('up')", path=[shim, other])
    assert (outcome.status, outcome.out) == (0, "witness True True sitecustomize\nup\n")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith("expert cache: off: ") and str(shim) in outcome.err


def test_a_search_that_fails_is_one_line(shim, tmp_path):
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    (python.site_packages / "break.pth").write_text(
        "import sys; sys.modules['_frozen_importlib_external'] = None\n"
    )
    outcome = python.run("-c", "print('up')", path=[shim])
    assert (outcome.status, outcome.out) == (0, "up\n")
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.startswith("expert cache: cannot look for a sitecustomize")


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9"])
def test_a_python_too_old_for_the_shim_runs_the_hidden_one_alone(version, shim, tmp_path):
    put_other(tmp_path, "print('other')")
    done = subprocess.run(
        [find_python(version), "-c", "import sys; print('expert_cache_shim' in sys.modules)"],
        env={"PYTHONPATH": f"{shim}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "other\nFalse\n", "")
