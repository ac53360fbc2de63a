"""The wheel, the editable install and the source distribution: what they carry, add and remove."""

import hashlib
import shutil
import subprocess
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from file_list import file_list, files_only
from packages import build_wheel, call_backend, can_build_wheels, copy_project, pip
from start_up import CURRENT, HOOK, Interpreter, make_venv, put_vllm

from expert_cache_shim import __version__

DIST_INFO = f"expert_cache_shim-{__version__}.dist-info"
WATCHES = "[type(finder).__name__ for finder in sys.meta_path].count('VllmWatch')"

pytestmark = pytest.mark.skipif(
    not can_build_wheels(), reason="needs pip, and setuptools 70.1 or an older one with wheel"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return copy_project(tmp_path_factory.mktemp("source") / "project")


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def python(tmp_path) -> Interpreter:
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    # Of another package: pip removes a site-packages that it leaves empty.
    (python.site_packages / "other.py").write_text("")
    return python


# --- the wheel ---


def test_the_wheel_holds_package_pth_amd_library_and_kernel_sources_and_nothing_else(source, wheel):
    package = source / "expert_cache_shim"
    modules = [*package.glob("*.py"), *package.glob("commands/*.py")]
    expected = {str(path.relative_to(source)) for path in modules}
    assert {"expert_cache_shim/bootstrap.py", "expert_cache_shim/commands/build.py"} < expected
    kernels = {f"expert_cache_shim/hip/{p.name}" for p in (source / "hip").iterdir() if p.is_file()}
    assert {"expert_cache_shim/hip/build.sh", "expert_cache_shim/hip/expert_cache.h"} < kernels
    expected |= kernels | {
        "expert_cache_shim.pth",
        "expert_cache_shim/lib/libexpertcache_hip.so",
        "expert_cache_shim/lib/libexpertcache_hip.so.sha256",
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = {name for name in names if name.startswith(DIST_INFO)}
        assert len(set(names)) == len(names)
        assert set(names) - described == expected
        assert {Path(name).name for name in described} == {
            "LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt",
        }  # fmt: skip
        assert archive.read("expert_cache_shim.pth") == HOOK.read_bytes()
        checksum, _ = archive.read("expert_cache_shim/lib/libexpertcache_hip.so.sha256").split()
        library = archive.read("expert_cache_shim/lib/libexpertcache_hip.so")
        assert hashlib.sha256(library).hexdigest() == checksum.decode()


def test_the_wheel_says_what_it_needs(wheel):
    assert wheel.name == f"expert_cache_shim-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        fields = Parser().parsestr(archive.read(f"{DIST_INFO}/METADATA").decode())
    required = [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line.split(">")[0] for line in required] == ["wrapt"]
    assert fields["Requires-Python"] == ">=3.10"
    assert set(fields.get_all("Provides-Extra")) == {"test", "tools"}
    assert "Apache-2.0" in (fields["License"], fields["License-Expression"])


def test_the_pth_is_one_line_of_plain_ascii():
    # Python runs a line of a .pth only if it starts with "import", and decodes it as it likes.
    (line,) = HOOK.read_bytes().decode("ascii").splitlines()
    assert line.startswith("import ")


def test_a_wheel_installs_starts_and_leaves_nothing_behind(wheel, python, tmp_path):
    home = python.executable.parent.parent
    before = file_list(home)
    pip(python, "install", "--no-deps", "--no-index", wheel)
    said = python.says(f"import sys, expert_cache_shim as s; print({WATCHES}, s.__file__)")
    assert said == f"1 {python.site_packages}/expert_cache_shim/__init__.py"

    # Without its dependency the shim stays out of the way, and says what is missing.
    outcome = python.run("-c", "import vllm", path=[put_vllm(tmp_path)])
    assert (outcome.status, outcome.out) == (0, "vllm\n") and "wrapt is missing" in outcome.err

    pip(python, "uninstall", "--yes", "expert-cache-shim")
    assert file_list(home) == before
    assert python.says(f"import sys; print({WATCHES})") == "0"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_an_installed_wheel_builds_kernels_that_pip_removes_with_the_rest(wheel, python):
    home = python.executable.parent.parent
    before = file_list(home)
    pip(python, "install", "--no-deps", "--no-index", wheel)
    load = "from expert_cache_shim import native; native.load('host')"
    script = python.executable.parent / "expert-cache"
    remedy = f"run `{script} build --arch host`"
    assert remedy in python.run("-c", load).err.splitlines()[-1]

    done = subprocess.run(
        [script, "build", "--arch", "host"], capture_output=True, text=True, cwd=home
    )
    library = python.site_packages / "expert_cache_shim" / "lib" / "libexpertcache_host.so"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith(f"built {library}: loads, ABI version ")
    assert library.is_file()
    pip(python, "uninstall", "--yes", "expert-cache-shim")
    assert file_list(home) == before


def test_the_pth_of_an_installed_wheel_is_left_to_pip(wheel, python):
    pip(python, "install", "--no-deps", "--no-index", wheel)
    hook = python.site_packages / "expert_cache_shim.pth"
    owner = f"{hook} belongs to expert-cache-shim {__version__}, which pip installed"
    command = ("-m", "expert_cache_shim")

    outcome = python.run(*command, "enable")
    assert (outcome.status, outcome.out, outcome.err) == (
        0, f"nothing to do: {owner}, and starts it\n", "",
    )  # fmt: skip
    outcome = python.run(*command, "disable")
    assert (outcome.status, outcome.out) == (1, "")
    assert owner in outcome.err and "pip uninstall expert-cache-shim" in outcome.err
    assert hook.read_bytes() == HOOK.read_bytes()


# --- the editable install ---


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_an_editable_install_starts_and_leaves_nothing_behind(mode, source, python, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(source, project)
    settings = {"editable_mode": mode}
    wheel = call_backend(project, "editable", tmp_path / "out", settings)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist().count("expert_cache_shim.pth") == 1
        assert archive.read("expert_cache_shim.pth") == HOOK.read_bytes()

    home = python.executable.parent.parent
    before = file_list(home)
    pip(python, "install", "--no-deps", "--no-index", wheel)
    (project / "expert_cache_shim" / "hooks.py").write_text("def register(): print('edited')")
    code = f"import sys; print({WATCHES}); import vllm"
    assert python.says(code, path=[put_vllm(tmp_path / "app")]) == "1\nedited\nvllm"
    pip(python, "uninstall", "--yes", "expert-cache-shim")
    assert file_list(home) == before


# --- the source distribution ---


def test_a_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    archive = call_backend(source, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path)
    (unpacked,) = tmp_path.glob("expert_cache_shim-*/")
    names = files_only(file_list(unpacked))
    hip = {f"hip/{path.name}" for path in (source / "hip").iterdir() if path.is_file()}
    assert {"hip/expert_cache.hip.cpp", "hip/build.sh"} < hip
    assert names > hip | {
        "expert_cache_shim.pth", "sitecustomize.py", "setup.py", "setup.cfg", "pyproject.toml",
        "LICENSE", "Makefile", "expert_cache_shim/lib/libexpertcache_hip.so",
        "tests/test_packaging.py",
    }  # fmt: skip
    assert not [name for name in names if name.endswith(("_host.so", "_cuda.so", ".pyc"))]

    with zipfile.ZipFile(call_backend(unpacked, "wheel", tmp_path / "out")) as rebuilt:
        with zipfile.ZipFile(wheel) as first:
            for name in set(first.namelist()) | set(rebuilt.namelist()):
                assert rebuilt.read(name) == first.read(name), name
