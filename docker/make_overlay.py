"""Makes the tree of files that an image gets: the package, and the .pth that starts it.

    python3 make_overlay.py PACKAGE_FOLDER OVERLAY [ARCHITECTURE...]

The build of an image runs it as root, with the Python that runs vLLM there. PACKAGE_FOLDER is
where the image will have the package; it is completed in place and then moved below OVERLAY,
which is copied onto the base as it is.

A .pth and not PYTHONPATH: it reaches this one Python and no other of the image, it works under
-E and -I, and no entrypoint or `docker run -e` can undo it by accident.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

WRAPT = "wrapt>=1.15"


def main(folder: Path, overlay: Path, archs: list[str]) -> None:
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    check_base()
    drop_what_is_not_for_an_image(folder)
    add_wrapt(folder)
    add_kernels(folder, archs)
    compile_bytecode(folder)
    let_everybody_read(folder)
    place(folder, overlay)


def check_base() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036  (the base decides)
        fail(f"{sys.executable} is Python {sys.version.split()[0]}; the shim needs 3.10 or later")
    from expert_cache_shim.commands.machine import find_package

    if find_package("vllm") is None:
        fail(
            f"{sys.executable} has no vLLM; name the Python that has, by "
            "--build-arg PYTHON=/path/to/python"
        )
    try:
        version = importlib.metadata.version("expert-cache-shim")
    except importlib.metadata.PackageNotFoundError:
        return
    fail(
        f"pip installed expert-cache-shim {version} in the base; serve with it, or "
        "`pip uninstall expert-cache-shim` there"
    )


def drop_what_is_not_for_an_image(folder: Path) -> None:
    """What may lie in a working copy: tests, bytecode of other Pythons, kernels for another
    processor or for a GPU that this PyTorch does not drive."""
    from expert_cache_shim.commands.machine import torch_backend

    libraries = folder / "expert_cache_shim" / "lib"
    (libraries / "libexpertcache_host.so").unlink(missing_ok=True)
    if torch_backend()[0] != "cuda":
        (libraries / "libexpertcache_cuda.so").unlink(missing_ok=True)
    shutil.rmtree(folder / "hip" / "tests", ignore_errors=True)
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)


def add_wrapt(folder: Path) -> None:
    """Beside the package where the base has none, so that it goes when the package goes."""
    from expert_cache_shim.commands.machine import find_package

    if find_package("wrapt") is not None:
        return
    print(f"the base has no {WRAPT}: adding it")
    into = ["install", "--quiet", "--no-deps", "--target", str(folder), WRAPT]
    commands = [[sys.executable, "-m", "pip", *into, "--no-cache-dir"]]
    if uv := shutil.which("uv"):
        commands.append([uv, "pip", *into, "--no-cache", "--python", sys.executable])
    if not any(run(*command) == 0 for command in commands):
        fail(f"{WRAPT} could not be installed; put it into the base: pip install '{WRAPT}'")


def add_kernels(folder: Path, archs: list[str]) -> None:
    """The library for AMD came with the package. One for NVIDIA may have come as well."""
    from expert_cache_shim.commands.machine import torch_backend

    if not archs:
        if torch_backend()[0] != "cuda":
            return
        if (folder / "expert_cache_shim" / "lib" / "libexpertcache_cuda.so").exists():
            print("taking libexpertcache_cuda.so from the build context")
            return
    asked = [word for arch in archs for word in ("--arch", arch)]
    if call_shim(folder, "build", *asked) != 0:
        fail("the kernels were not built; for NVIDIA, `make cuda` before does without an nvcc here")


def compile_bytecode(folder: Path) -> None:
    """Valid whatever times the files get on their way into the image."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, quiet=1, force=True, invalidation_mode=mode)


def let_everybody_read(folder: Path) -> None:
    """The umask of a working copy may have kept others out, and the base's user may be one."""
    for path in (folder, *folder.rglob("*")):
        executable = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if executable else 0o644)


def place(folder: Path, overlay: Path) -> None:
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    make_as_in_base(overlay, site_packages)
    # By the package where the image will have it, so that the .pth names that place.
    hook = str(below(overlay, site_packages))
    if call_shim(folder, "enable", "--prefix", hook) != 0:
        fail(f"the .pth was not written for {site_packages}")
    make_as_in_base(overlay, folder.parent)
    shutil.move(folder, below(overlay, folder))


def below(overlay: Path, path: Path) -> Path:
    return overlay / path.relative_to("/")


def make_as_in_base(overlay: Path, folder: Path) -> None:
    """The folders that lead to what is added, as they are in the base: a builder may give the
    attributes of a copied folder to the one that is there."""
    for there in [*reversed(folder.parents), folder][1:]:
        here = below(overlay, there)
        if here.exists():
            continue
        here.mkdir(parents=True)
        owner = there.stat()
        os.chown(here, owner.st_uid, owner.st_gid)
        shutil.copystat(there, here)


def call_shim(folder: Path, *words: str) -> int:
    return run(sys.executable, "-m", "expert_cache_shim", *words, PYTHONPATH=str(folder))


def run(*command: str, **environ: str) -> int:
    sys.stdout.flush()
    return subprocess.run(command, env=os.environ | environ).returncode


def fail(text: str) -> None:
    sys.exit(f"make_overlay.py: {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
