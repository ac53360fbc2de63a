"""make_overlay.py in real virtual environments that stand in for the Python of a base."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import wrapt
from start_up import CURRENT, PACKAGE, ROOT, Interpreter, Outcome, make_venv, put_vllm

from expert_cache_shim import native

SCRIPT = ROOT / "docker" / "make_overlay.py"


@pytest.fixture
def python(tmp_path: Path) -> Interpreter:
    """Without pip and without a network: whatever would be fetched fails."""
    python = make_venv(CURRENT, tmp_path / "venv", "--without-pip")
    put_vllm(python.site_packages)
    source = Path(wrapt.__file__).parent
    shutil.copytree(source, python.site_packages / "wrapt", ignore=shutil.ignore_patterns("*.so"))
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The package as COPY puts it into the base, from a working copy in use."""
    folder = tmp_path / "opt" / "shim"
    local = shutil.ignore_patterns("libexpertcache_host.so", "libexpertcache_cuda.so")
    shutil.copytree(PACKAGE, folder / "expert_cache_shim", ignore=local)
    shutil.copytree(ROOT / "hip", folder / "hip")
    for backend in ("host", "cuda"):
        (folder / "expert_cache_shim" / "lib" / f"libexpertcache_{backend}.so").touch()
    return folder


def put_torch(python: Interpreter, cuda: str | None) -> None:
    package = python.site_packages / "torch"
    package.mkdir()
    (package / "version.py").write_text(f"__version__ = '2.99'\ncuda = {cuda!r}\nhip = None\n")


def make(python: Interpreter, folder: Path, *archs: str) -> Outcome:
    overlay = folder.parents[1] / "overlay"
    path = os.environ["PATH"]
    return python.run(str(SCRIPT), str(folder), str(overlay), *archs, PATH=path, HOME=str(overlay))


def overlay_files(folder: Path) -> dict[str, Path]:
    """By their place in the image."""
    overlay = folder.parents[1] / "overlay"
    return {f"/{p.relative_to(overlay)}": p for p in overlay.rglob("*") if p.is_file()}


def test_the_overlay_has_the_package_its_sources_and_one_hook(python, folder):
    assert make(python, folder).status == 0
    found = overlay_files(folder)
    hook = python.site_packages.resolve() / "expert_cache_shim.pth"
    outside = {place for place in found if not place.startswith(f"{folder}/")}
    assert outside == {str(hook)}
    assert found[str(hook)].read_text().splitlines()[1] == str(folder)
    assert f"{folder}/hip/build.sh" in found
    assert not any("/hip/tests/" in place for place in found)
    libraries = {Path(place).name for place in found if place.endswith(".so")}
    assert libraries == {"libexpertcache_hip.so"}
    assert not folder.exists()


def test_bytecode_does_not_depend_on_the_times_of_files(python, folder):
    make(python, folder)
    found = overlay_files(folder)
    modules = [p for place, p in found.items() if place.endswith(".py")]
    bytecode = [p for place, p in found.items() if place.endswith(".pyc")]
    assert len(bytecode) == len(modules) > 20
    # PEP 552: bit 0 says that a hash stands for the source, bit 1 that it is to be compared.
    assert {int.from_bytes(p.read_bytes()[4:8], "little") for p in bytecode} == {0b01}


def test_everybody_may_read_what_a_umask_kept_private(python, folder):
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & 0o700)
    make(python, folder)
    overlay = folder.parents[1] / "overlay"
    placed = overlay / folder.relative_to("/")
    modes = {path.stat().st_mode & 0o777 for path in (placed, *placed.rglob("*"))}
    assert modes == {0o755, 0o644}


def test_folders_on_the_way_are_like_those_of_the_base(python, folder):
    python.site_packages.chmod(0o711)
    make(python, folder)
    overlay = folder.parents[1] / "overlay"
    copy = overlay / python.site_packages.resolve().relative_to("/")
    assert copy.stat().st_mode & 0o777 == 0o711


def test_a_library_for_nvidia_comes_from_the_build_context(python, folder):
    put_torch(python, cuda="13.0")
    said = make(python, folder)
    assert (said.status, "taking libexpertcache_cuda.so" in said.out) == (0, True)
    assert f"{folder}/expert_cache_shim/lib/libexpertcache_cuda.so" in overlay_files(folder)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
def test_without_one_nvcc_builds_it_for_what_is_asked(python, folder):
    put_torch(python, cuda="13.0")
    (folder / "expert_cache_shim" / "lib" / "libexpertcache_cuda.so").unlink()
    said = make(python, folder, "sm_90")
    assert said.status == 0, said
    library = overlay_files(folder)[f"{folder}/expert_cache_shim/lib/libexpertcache_cuda.so"]
    assert native.load("cuda", library).architectures == ("sm_90", "compute_90")


def test_without_one_and_without_nvcc_the_build_stops(python, folder):
    put_torch(python, cuda="13.0")
    (folder / "expert_cache_shim" / "lib" / "libexpertcache_cuda.so").unlink()
    overlay = folder.parents[1] / "overlay"
    said = python.run(str(SCRIPT), str(folder), str(overlay), PATH=os.defpath, NVCC="/no/nvcc")
    assert said.status == 1
    assert "NVCC=/no/nvcc: no such command" in said.err
    assert said.err.splitlines()[-1].startswith("make_overlay.py: the kernels were not built;")


def test_a_python_without_vllm_is_refused(python, folder):
    shutil.rmtree(python.site_packages / "vllm")
    said = make(python, folder)
    assert said.status == 1
    assert "has no vLLM; name the Python that has, by --build-arg PYTHON=" in said.err


def test_a_base_where_pip_installed_the_shim_is_refused(python, folder):
    metadata = python.site_packages / "expert_cache_shim-9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: expert-cache-shim\nVersion: 9\n")
    said = make(python, folder)
    assert said.status == 1
    assert "pip installed expert-cache-shim 9 in the base" in said.err


def test_without_wrapt_and_without_pip_the_line_says_so(python, folder):
    shutil.rmtree(python.site_packages / "wrapt")
    overlay = folder.parents[1] / "overlay"
    said = python.run(str(SCRIPT), str(folder), str(overlay), PATH="/nowhere")
    assert said.status == 1
    assert said.err.splitlines()[-1] == (
        "make_overlay.py: wrapt>=1.15 could not be installed; put it into the base: "
        "pip install 'wrapt>=1.15'"
    )
