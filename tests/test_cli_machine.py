"""What the machine is asked, over copies of the files in which Linux answers."""

import os
from pathlib import Path

import pytest

from expert_cache_shim.commands import machine


def put_nodes(folder: Path, *versions: int) -> Path:
    for index, version in enumerate(versions):
        node = folder / str(index)
        node.mkdir()
        (node / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        )
    return folder


@pytest.mark.parametrize("version, name", [
    (90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (100300, "gfx1030"),
    (110001, "gfx1101"), (120001, "gfx1201"), (90012, "gfx90c"),
])  # fmt: skip
def test_the_driver_s_number_of_an_amd_gpu_is_its_name(tmp_path, version, name):
    # A processor is a node as well, with version 0.
    assert machine.amd_architectures(put_nodes(tmp_path, 0, version), {}) == (name,)


def test_each_kind_of_gpu_counts_once(tmp_path):
    nodes = put_nodes(tmp_path, 0, 90402, 90402, 120001)
    assert machine.amd_architectures(nodes, {}) == ("gfx1201", "gfx942")


def test_the_name_under_which_the_runtime_uses_a_gpu_counts(tmp_path):
    override = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    assert machine.amd_architectures(put_nodes(tmp_path, 100302), override) == ("gfx1030",)
    assert machine.amd_architectures(tmp_path / "absent", override) == ()


def test_no_amd_driver_is_no_gpu(tmp_path):
    assert machine.amd_architectures(tmp_path / "absent", {}) == ()
    assert machine.amd_architectures(put_nodes(tmp_path, 0), {}) == ()


@pytest.mark.parametrize("said, found", [
    ("9.0\n9.0\n", ("sm_90",)), ("8.6\n12.0\n", ("sm_120", "sm_86")),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver\n", ()),
])  # fmt: skip
def test_nvidia_smi_is_asked(tmp_path, monkeypatch, said, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'TEXT'\n{said}TEXT\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert machine.nvidia_architectures() == found


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def limit(tmp_path: Path, memberships: str) -> int | None:
    put(tmp_path, "memberships", memberships)
    return machine.cgroup_memory_limit(tmp_path / "memberships", tmp_path)


def test_the_tightest_group_above_a_process_limits_it(tmp_path):
    put(tmp_path, "slice/memory.max", "2000")
    put(tmp_path, "slice/service/memory.max", "max")
    put(tmp_path, "other/memory.max", "1")
    assert limit(tmp_path, "0::/slice/service") == 2000


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path):
    put(tmp_path, "memory.max", "3000")
    assert limit(tmp_path, "0::/") == 3000
    assert limit(tmp_path, "0::/../../not/in/sight") == 3000


def test_the_first_version_of_control_groups(tmp_path):
    put(tmp_path, "memory/memory.limit_in_bytes", "9223372036854771712")
    put(tmp_path, "memory/docker/x/memory.limit_in_bytes", "4000")
    assert limit(tmp_path, "5:cpu:/\n4:memory:/docker/x\n0::/") == 4000


def test_no_limit(tmp_path):
    put(tmp_path, "memory/memory.limit_in_bytes", "9223372036854771712")
    put(tmp_path, "memory.max", "max")
    assert limit(tmp_path, "4:memory:/\n0::/") is None


def test_the_file_system_of_a_folder_is_that_of_its_last_and_deepest_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw - ext4 disk rw\n"
        "2 1 0:2 / /dev rw - devtmpfs none rw\n"
        "3 2 0:3 / /dev/shm rw shared:1 - ext4 disk rw\n"
        "4 2 0:4 / /dev/shm rw,nosuid shared:2 master:3 - tmpfs shm rw\n"
        f"5 1 0:5 / {tmp_path}/a\\040b rw - ramfs none rw\n"
    )
    assert machine.filesystem_of(Path("/dev/shm"), mounts) == "tmpfs"
    assert machine.filesystem_of(Path("/usr"), mounts) == "ext4"
    assert machine.filesystem_of(tmp_path / "a b", mounts) == "ramfs"


def test_this_machine_answers():
    total, available = machine.memory_total()
    assert 0 < available <= total
    assert machine.filesystem_of(Path("/proc")) == "proc"
