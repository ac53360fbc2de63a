"""The lines of `doctor -- vllm serve …`: what vLLM's parser makes of it, and what that means."""

import json
import subprocess
import sys

import pytest
from model_configs import CONFIGS
from start_up import ROOT

from expert_cache_shim.commands import CommandError, check_host, check_offload
from expert_cache_shim.commands.check import Check

GIB = 2**30


def arguments(**changes) -> dict:
    """What the parser gives for the command that the README tells to use."""
    found = {
        "model_tag": "an/unknown-model", "cpu_offload_gb": 60.0, "cpu_offload_params": ["experts"],
        "offload_backend": "auto", "offload_group_size": 0, "tensor_parallel_size": 1,
        "data_parallel_size": 1, "enable_lora": None, "enable_eplb": False, "enable_dbo": False,
    }  # fmt: skip
    return found | changes


def checks(version="0.33.0", environ=(), **changes) -> list[Check]:
    return check_offload.check_arguments(arguments(**changes), version, dict(environ))


def only(**changes) -> Check:
    (check,) = checks(**changes)
    return check


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a model; 54 GiB of experts."""
    (tmp_path / "config.json").write_bytes((CONFIGS / "qwen3-30b-a3b.json").read_bytes())
    return str(tmp_path)


@pytest.fixture
def memory(monkeypatch):
    def give(gib):
        monkeypatch.setattr(check_offload, "memory_total", lambda: (gib * GIB, gib * GIB))
        monkeypatch.setattr(check_offload, "cgroup_memory_limit", lambda: None)

    return give


def test_the_command_of_the_readme_is_right():
    assert only() == Check("offload", "ok", "60 GiB a GPU, of the experts (uva)")


@pytest.mark.parametrize(
    "changes, status, found, remedy",
    [
        ({"cpu_offload_gb": 0}, "fail", "alone offloads nothing", "--cpu-offload-gb N"),
        ({"cpu_offload_gb": 0, "cpu_offload_params": []}, "warn", "vLLM offloads nothing",
         "--cpu-offload-gb N --cpu-offload-params experts"),
        ({"cpu_offload_params": []}, "warn", "all weights (uva); attention is read from the host",
         "--cpu-offload-params experts"),
        ({"cpu_offload_params": ["expert"]}, "fail", "expert matches no expert", "params experts"),
        ({"cpu_offload_params": ["experts.w2_weight", "mlp"]}, "ok", "60 GiB", ""),
        ({"offload_backend": "prefetch"}, "fail", "the prefetch offloader", "--offload-backend"),
        ({"offload_group_size": 8}, "fail", "the prefetch offloader", "--offload-backend uva"),
        ({"offload_group_size": 8, "offload_backend": "uva"}, "ok", "60 GiB", ""),
        ({"environ": {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}}, "fail", "copies whole layers",
         "unset it"),
        ({"environ": {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "version": "0.27.1"}, "fail",
         "0.27.1 ignores it", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"environ": {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "version": "0.28.0"}, "ok", "60 GiB", ""),
        ({"environ": {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "version": ""}, "ok", "60 GiB", ""),
    ],
)  # fmt: skip
def test_what_the_offloader_is_asked(changes, status, found, remedy):
    check = only(**changes)
    assert check.status == status and found in check.found and remedy in check.remedy
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    "name, option",
    [("enable_lora", "--enable-lora"), ("enable_eplb", "--enable-eplb"),
     ("enable_dbo", "--enable-dbo")],
)  # fmt: skip
def test_options_under_which_every_layer_is_refused(name, option):
    offload, refused = checks(**{name: True})
    assert offload.status == "ok" and refused.status == "fail" and option in refused.remedy


def test_data_parallelism_is_refused():
    assert checks(data_parallel_size=2)[1].remedy == "serve without --data-parallel-size"


def test_too_little_is_offloaded_and_memory_is_short(model, memory):
    memory(256)
    few, host = checks(model_tag=model, cpu_offload_gb=40.0)
    assert (few.status, host.status) == ("warn", "ok")
    assert "the experts are 54 GiB a GPU, and the last layers stay resident" in few.found
    assert host.found == "54 GiB of experts take 72 GiB of pinned memory"
    memory(64)  # enough for the experts, not for what PyTorch makes of them
    assert [check.status for check in checks(model_tag=model)] == ["ok", "warn"]
    memory(32)
    assert [check.status for check in checks(model_tag=model)] == ["ok", "fail"]


def test_ranks_share_the_experts(model, memory):
    memory(256)
    offload, host = checks(model_tag=model, cpu_offload_gb=28.0, tensor_parallel_size=2)
    assert offload.status == "ok" and host.found.startswith("54 GiB of experts take 72 GiB")


def test_models_that_0_24_gives_to_its_second_runner(tmp_path):
    (tmp_path / "config.json").write_bytes((CONFIGS / "deepseek-v2-lite.json").read_bytes())
    changes = {"model_tag": str(tmp_path), "version": "0.25.1"}
    assert checks(**changes)[0].status == "fail"
    assert checks(**changes, environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})[0].status == "ok"
    assert checks(model_tag=str(tmp_path), version="0.23.0")[0].status == "ok"


@pytest.mark.parametrize("config", ["", "{}", '{"model_type": "qwen3_moe", "hidden_size": -1}'])
def test_a_model_that_cannot_be_read_is_no_hindrance(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    assert only(model_tag=str(tmp_path)).status == "ok"


def test_without_vllm_or_with_an_error_it_says_so():
    (check,) = check_offload.check_arguments({}, None)
    assert check.status == "warn" and "no vLLM" in check.found
    (check,) = check_offload.check_arguments({"error": "vllm: error: no"}, "0.33.0")
    assert (check.status, check.found) == ("fail", "vllm: error: no")


def test_other_commands_are_refused():
    assert check_offload.serve_words(["/usr/bin/vllm", "serve", "m"]) == ["serve", "m"]
    assert check_offload.serve_words(["serve", "m"]) == ["serve", "m"]
    for words in (["vllm"], ["vllm", "bench"], ["EXPERT_CACHE_SLOTS=3", "vllm", "serve", "m"]):
        with pytest.raises(CommandError, match=r"is no `vllm serve MODEL \.\.\.`"):
            check_offload.serve_words(words)


def test_shared_memory_of_a_container(monkeypatch):
    class Small:
        f_frsize, f_blocks = 4096, 2**14

    assert check_host.check_shared_memory().status in ("ok", "warn")
    monkeypatch.setattr(check_host.os, "statvfs", lambda folder: Small)
    check = check_host.check_shared_memory()
    assert check.status == "warn" and "/dev/shm has 64 MiB" in check.found
    assert "--shm-size" in check.remedy
    monkeypatch.undo()
    assert check_host.check_shared_memory("/no/such").status == "warn"


# --- vLLM itself ----------------------------------------------------------------------------


def doctor(*words: str, **environ: str) -> dict[str, list[dict]]:
    done = subprocess.run(
        [sys.executable, "-m", "expert_cache_shim", "doctor", "--json", "--", *words],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    found: dict[str, list[dict]] = {}
    for check in json.loads(done.stdout)["checks"]:
        found.setdefault(check["name"], []).append(check)
    return found


def test_vllms_own_parser_reads_the_command(model):
    pytest.importorskip("vllm")
    found = doctor(
        "vllm", "serve", model, "--cpu-offload-gb=40", "--cpu-offload-params", "experts",
        "--enable-lora",
    )  # fmt: skip
    (offload,) = found["offload"]
    assert offload["status"] == "warn" and offload["found"].startswith("40 GiB a GPU, of the exp")
    assert [check["status"] for check in found["arguments"]] == ["fail"]
    assert len(found["host memory"]) == 2


def test_vllms_own_parser_names_what_it_does_not_know():
    pytest.importorskip("vllm")
    (offload,) = doctor("vllm", "serve", "m", "--cpu-ofload-gb", "4")["offload"]
    assert offload["status"] == "fail"
    assert offload["found"] == "vllm: error: unrecognized arguments: --cpu-ofload-gb 4"
