"""Builds the overlay on a real base image, serves from both, and compares them.

    make image-test

Needs root, buildah, mmdebstrap, a mirror of Debian, and the environment of `make venv`. It takes
minutes, so pytest runs it by this name only. The base is that of base_image.py: a CPU build of
vLLM on Debian. No GPU takes part.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from base_image import ENGINE, SUITES, USER, make_base, make_debian
from buildah import Store
from file_list import file_list, files_only

from expert_cache_shim.telemetry import read_folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import tiny_moe  # noqa: E402
from generate import PROMPTS  # noqa: E402

HOST_LIBRARY = ROOT / "expert_cache_shim" / "lib" / "libexpertcache_host.so"
HOME = "opt/expert-cache-shim"
HOOK = "usr/local/lib/python3.11/dist-packages/expert_cache_shim.pth"
BASE, OVERLAY = "localhost/base", "localhost/overlay"
MOUNT_ENGINE = ("--volume", f"{sysconfig.get_path('purelib')}:{ENGINE}:ro")
IN_CHROOT = ("--isolation", "chroot", *MOUNT_ENGINE)
# What a user would set to serve a CPU's weights through the emulated kernels.
CACHE = {
    "EXPERT_CACHE_ALLOW_CPU": "1",
    "EXPERT_CACHE_SLOTS": "8",
    "EXPERT_CACHE_LIB": "/run/kernels.so",
    "EXPERT_CACHE_SNAPSHOT": "/run/counters",
}
ENGINE_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
    missing = [tool for tool in ("buildah", "mmdebstrap") if not shutil.which(tool)]
    assert not missing, f"apt-get install --no-install-recommends {' '.join(missing)}"
    assert os.geteuid() == 0, "run this as root: images are built in a chroot"
    version = "{}.{}".format(*sys.version_info)
    assert version in SUITES, f"the base's Python is that of the environment: {', '.join(SUITES)}"
    folder = tmp_path_factory.mktemp("image")
    store = Store(folder / "store")
    try:
        make_debian(SUITES[version], folder / "debian.tar")
        make_base(store, folder / "debian.tar", BASE)
        (folder / "debian.tar").unlink()
        store.call(*build(ROOT, OVERLAY))
        yield store
    finally:
        store.remove()


def build(context: Path, image: str, *options: str) -> list[str]:
    """The words of buildah that build the overlay, without a network."""
    return [
        "bud", "--pull-never", "--network", "none", "--identity-label=false",
        "--build-arg", f"BASE={BASE}", *(options or MOUNT_ENGINE),
        "-f", str(context / "docker" / "Dockerfile"), "-t", image, str(context),
    ]  # fmt: skip


def files_of(store: Store, image: str) -> dict:
    with store.container(image) as container, store.tree(container) as root:
        return file_list(root)


def expected_files() -> set[str]:
    """What git tracks of the package and of the kernel sources, bytecode, and the hook."""
    sources = subprocess.run(
        ["git", "ls-files", "expert_cache_shim", "hip", ":!hip/tests", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    modules = [Path(source) for source in sources if source.endswith(".py")]
    bytecode = {f"{m.parent}/__pycache__/{m.stem}.cpython-311.pyc" for m in modules}
    return {f"{HOME}/{path}" for path in {*sources, *bytecode}} | {HOOK}


def test_the_overlay_adds_its_own_files_and_changes_no_other(store):
    base, overlay = files_of(store, BASE), files_of(store, OVERLAY)
    assert {path for path, entry in base.items() if overlay.get(path) != entry} == set()
    added = {path: entry for path, entry in overlay.items() if path not in base}
    assert files_only(added) == expected_files()
    folders = set(added) - files_only(added)
    assert {path for path in folders if not f"{path}/".startswith(f"{HOME}/")} == set()
    assert {entry.owner for entry in added.values()} == {(0, 0)}


def test_entrypoint_user_environment_and_labels_stay(store):
    assert store.config(OVERLAY) == store.config(BASE)
    assert store.config(BASE)["Entrypoint"] == ["vllm", "serve"]
    assert store.config(BASE)["User"] == str(USER)


def test_without_its_files_the_image_is_the_base(store):
    with store.container(OVERLAY) as container:
        disable = ["python3", "-m", "expert_cache_shim", "disable"]
        said = store.call("run", *IN_CHROOT, "--user", "0", container, "--", *disable)
        assert said.startswith(f"removed /{HOOK}")
        with store.tree(container) as root:
            shutil.rmtree(root / HOME)
            left = file_list(root)
    assert left == files_of(store, BASE)


@pytest.mark.parametrize("flags", [[], ["-E"], ["-I"]], ids=["plain", "-E", "-I"])
def test_the_shim_starts_in_the_image_and_not_in_the_base(store, flags):
    asks = "import sys; print('expert_cache_shim.bootstrap' in sys.modules)"
    for image, starts in ((OVERLAY, "True"), (BASE, "False")):
        with store.container(image) as container:
            python = ["python3", *flags, "-c", asks]
            assert store.call("run", *IN_CHROOT, container, "--", *python) == starts


def test_doctor_says_what_is_active(store):
    settings = ["--env", "EXPERT_CACHE_SLOTS=8"]
    doctor = ["python3", "-m", "expert_cache_shim", "doctor", "--json"]
    with store.container(OVERLAY) as container:
        report = json.loads(store.call("run", *IN_CHROOT, *settings, container, "--", *doctor))
    found = {}
    for check in report["checks"]:
        found.setdefault(check["name"], check["found"])
    assert report["passed"]
    assert found["start"] == f"starts with Python by /{HOOK}"
    assert found["settings"] == "EXPERT_CACHE_SLOTS=8"
    assert found["vllm"].startswith("0.")


def test_a_damaged_library_fails_the_build(store, tmp_path):
    for name in ("docker", "expert_cache_shim", "hip"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    library = tmp_path / "expert_cache_shim" / "lib" / "libexpertcache_hip.so"
    library.write_bytes(library.read_bytes()[:-1])
    said = store.refusal(*build(tmp_path, "localhost/damaged"))
    assert "fail  kernels" in said and library.name in said


def test_a_python_without_vllm_fails_the_build_in_one_line(store):
    said = store.refusal(*build(ROOT, "localhost/none", "--build-arg", "PYTHON=/usr/bin/python3"))
    assert "make_overlay.py: /usr/bin/python3 has no vLLM; name the Python that has" in said


def test_the_overlay_serves_the_tokens_of_the_base(store, tmp_path):
    model = tiny_moe.write_checkpoint("qwen3_moe", tmp_path / "model", tiny_moe.Shape())
    counters = tmp_path / "counters"
    counters.mkdir()
    counters.chmod(0o777)  # the image's user writes there, and reads the model
    (model / "model.safetensors").chmod(0o644)
    mounts = {model: "/run/model:ro", HOST_LIBRARY: "/run/kernels.so:ro", counters: "/run/counters"}

    with server(store, BASE, mounts, CACHE, tmp_path / "base.log") as port:
        reference = complete(port)
    assert read_folder(counters) == []
    with server(store, OVERLAY, mounts, CACHE, tmp_path / "overlay.log") as port:
        answers = complete(port)

    assert len(set(map(tuple, reference))) > 1
    assert answers == reference
    log = (tmp_path / "overlay.log").read_text()
    assert "expert cache: 4 of 4 MoE layers of /run/model armed" in log
    (snapshot,) = read_folder(counters)
    assert snapshot.total("misses") > 0 and snapshot.total("hits") > 0
    print(f"{sum(map(len, answers))} tokens identical, {snapshot.total('misses')} misses")


@contextmanager
def server(
    store: Store, image: str, mounts: dict[Path, str], settings: dict[str, str], log: Path
) -> Iterator[int]:
    """`vllm serve` by the image's own entrypoint, as its own user; yields the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [word for path, place in mounts.items() for word in ("--volume", f"{path}:{place}")]
    for name, value in {**ENGINE_SETTINGS, **settings}.items():
        options += ["--env", f"{name}={value}"]
    serve = [*store.config(image)["Entrypoint"], "/run/model", "--port", str(port)]
    serve += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--seed", "0"]
    with store.container(image) as container:
        command = store.command("run", *IN_CHROOT, *options, container, "--", *serve)
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            wait_until_healthy(process, port, log)
            yield port
        finally:
            stop(process)


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"no server:\n{log.read_text(errors='replace')[-6000:]}")


def stop(process: subprocess.Popen) -> None:
    """Ends `buildah run` and all that it started: the session of its own, and no more."""
    for name in ("INT", "KILL"):
        subprocess.run(["pkill", f"-{name}", "--session", str(process.pid)])
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


def complete(port: int) -> list[list[int]]:
    """Greedy token ids of every prompt, through /v1/completions."""
    content = {
        "model": "/run/model", "prompt": PROMPTS, "max_tokens": 32, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices = json.load(answer)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])]
