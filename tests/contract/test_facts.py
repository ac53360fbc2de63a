"""Facts in made-up releases: what is as it should be, and what a change makes of it."""

from __future__ import annotations

import pytest
from releases import examined, fact

from expert_cache_shim import vllm_compat
from tools.vllm_contract import loading, served
from tools.vllm_contract.contract import FACTS
from tools.vllm_contract.facts import ABSENT, DIFFERS, OK

LOADER = "model_executor/model_loader"
LOADED = {
    f"{LOADER}/utils.py": (
        "def process_weights_after_loading(model, model_config, target_device):\n    pass\n"
    ),
    f"{LOADER}/base_loader.py": "from .utils import process_weights_after_loading\n",
}
FUSED_MOE = "model_executor/layers/fused_moe"
METHOD = """
class FusedMoEMethodBase(Base):
    def apply(self, layer, x, topk_weights, topk_ids, shared_experts):
        pass

    @property
    def is_monolithic(self):
        return False

class Fp8MoEMethod(FusedMoEMethodBase):
    def apply(self, layer, x, topk_weights, topk_ids, shared_experts):
        pass
"""
APPLY = "apply of every FusedMoEMethodBase takes layer, x, topk_weights, topk_ids"
CALL = "layers call apply by keyword"
CALLED = (
    "def forward(self):\n    self.quant_method.apply("
    "layer=self, x=x, topk_weights=weights, topk_ids=ids)\n"
)
EXPERTS = """
class TritonExperts(FusedMoEExpertsModular):
    @staticmethod
    def is_supported_config(moe_config):
        return moe_config.num_experts < 1024

    def apply(self, hidden_states, w1, w2, topk_ids):
        E = w1.shape[0]
"""


def changed(text: str, old: str, new: str, count: int = -1) -> str:
    assert old in text
    return text.replace(old, new, count)


def test_a_fact_names_the_file_and_the_line(tmp_path):
    name = "process_weights_after_loading(model, model_config, target_device)"
    result = examined(name, tmp_path, LOADED)
    assert (result.status, result.places) == (OK, (f"vllm/{LOADER}/utils.py:1",))


def test_a_renamed_parameter_is_caught(tmp_path):
    name = "process_weights_after_loading(model, model_config, target_device)"
    utils = f"{LOADER}/utils.py"
    files = {**LOADED, utils: changed(LOADED[utils], "target_device", "device")}
    result = examined(name, tmp_path, files)
    assert result.status == DIFFERS
    assert "['model', 'model_config', 'device']" in result.reason


def test_a_parameter_that_one_of_many_classes_renamed_is_caught(tmp_path):
    assert examined(APPLY, tmp_path, {"a.py": METHOD}).status == OK
    head, tail = METHOD.split("class Fp8")
    files = {"a.py": head + "class Fp8" + changed(tail, "topk_ids", "ids")}
    assert "vllm/a.py:11 takes" in examined(APPLY, tmp_path, files).reason


def test_a_class_that_derives_by_way_of_another_is_read(tmp_path):
    files = {
        "a.py": METHOD,
        "b.py": "class Mine(a.Fp8MoEMethod):\n    def apply(self, layer, x, ids): ...\n",
    }
    assert "vllm/b.py:2 takes" in examined(APPLY, tmp_path, files).reason


@pytest.mark.parametrize("name", ["gpu_worker.Worker is there", "Worker.wake_up"])
def test_a_class_that_vanished_is_caught(tmp_path, name):
    worker = "class Worker(WorkerBase):\n    def wake_up(self, tags=None): ...\n"
    files = {"v1/worker/gpu_worker.py": worker}
    assert examined(name, tmp_path, files).status == OK
    files = {"v1/worker/gpu_worker.py": changed(worker, "class Worker", "class GPUWorker")}
    result = examined(name, tmp_path, files)
    assert (result.status, result.reason) == (
        DIFFERS, "vllm/v1/worker/gpu_worker.py has no class Worker",
    )  # fmt: skip


def test_a_method_that_moved_to_a_base_is_caught(tmp_path):
    """The shim wraps a class's own methods only."""
    text = "class Base:\n    def wake_up(self, tags): ...\nclass Worker(Base):\n    pass\n"
    result = examined("Worker.wake_up", tmp_path, {"v1/worker/gpu_worker.py": text})
    assert result.status == DIFFERS


NO_OTHER = "no other module imports it by name"


@pytest.mark.parametrize(
    "statement",
    [
        "from vllm.model_executor.model_loader.utils import process_weights_after_loading",
        "from .utils import (\n    other,\n    process_weights_after_loading as finish,\n)",
        "def load():\n    from .utils import process_weights_after_loading",
    ],
)
def test_a_new_module_that_imports_the_function_by_name_is_caught(tmp_path, statement):
    assert examined(NO_OTHER, tmp_path, LOADED).status == OK
    files = {f"{LOADER}/new_loader.py": f"{statement}\n"}
    result = examined(NO_OTHER, tmp_path, files)
    assert result.status == DIFFERS
    assert "new_loader.py" in result.reason


def test_a_module_that_only_mentions_the_function_is_not(tmp_path):
    text = '"""See process_weights_after_loading."""\nself.process_weights_after_loading()\n'
    assert examined(NO_OTHER, tmp_path, {**LOADED, "other.py": text}).status == OK


def test_a_call_through_the_module_is_caught(tmp_path):
    name = "nothing calls it as an attribute of its module"
    assert examined(name, tmp_path, LOADED).status == OK
    call = "from . import utils\nutils.process_weights_after_loading(model, config, device)\n"
    files = {f"{LOADER}/new_loader.py": call}
    assert "new_loader.py:2" in examined(name, tmp_path, files).reason


def test_a_new_way_to_change_weights_is_caught(tmp_path):
    name = "no other public method of Worker is named for weights"
    text = "class Worker:\n    def update_weights(self): ...\n"
    text += "    def start_weight_update(self): ...\n    def _load_weights(self): ...\n"
    assert examined(name, tmp_path, {"v1/worker/gpu_worker.py": text}).status == OK
    text += "    def swap_weights(self): ...\n"
    result = examined(name, tmp_path, {"v1/worker/gpu_worker.py": text})
    assert "defines swap_weights" in result.reason


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("layer=self, ", "self, ", "by position"),
        (", topk_ids=ids", "", "does not pass ['topk_ids']"),
        ("topk_ids=", "ids=", "does not pass ['topk_ids']"),
    ],
)
def test_a_call_by_position_or_by_another_name_is_caught(tmp_path, old, new, said):
    assert examined(CALL, tmp_path, {f"{FUSED_MOE}/layer.py": CALLED}).status == OK
    files = {f"{FUSED_MOE}/layer.py": changed(CALLED, old, new)}
    assert said in examined(CALL, tmp_path, files).reason


def test_a_property_that_became_a_method_is_caught(tmp_path):
    name = "is_monolithic is a property of every method that defines it"
    assert examined(name, tmp_path, {"a.py": METHOD}).status == OK
    files = {"a.py": changed(METHOD, "    @property\n", "")}
    assert examined(name, tmp_path, files).status == DIFFERS


FEWER = "what plain storage serves reads the number of experts from the weights only"


def test_a_count_that_experts_read_beside_the_weights_is_caught(tmp_path):
    assert examined(FEWER, tmp_path, {"a.py": EXPERTS}).status == OK
    files = {"a.py": changed(EXPERTS, "E = w1.shape[0]", "E = self.moe_config.num_experts")}
    assert "self.moe_config.num_experts at vllm/a.py:8" in examined(FEWER, tmp_path, files).reason


def test_a_count_that_a_new_base_reads_is_caught(tmp_path):
    base = "class Scratch:\n    def buffer(self):\n        return self.num_local_experts\n"
    files = {
        "a.py": changed(EXPERTS, "(FusedMoEExpertsModular)", "(Scratch, FusedMoEExpertsModular)"),
        "b.py": base,
    }
    assert "at vllm/b.py:3" in examined(FEWER, tmp_path, files).reason


def test_a_tensor_that_was_added_to_a_descriptor_is_caught(tmp_path):
    name = "FusedMoEQuantDesc has scale, alpha_or_gscale, zp, bias and no other tensor"
    names = ("scale", "alpha_or_gscale", "zp", "bias")
    text = "class FusedMoEQuantDesc:\n    dtype: str | None = None\n"
    text += "".join(f"    {name}: torch.Tensor | None = None\n" for name in names)
    assert examined(name, tmp_path, {f"{FUSED_MOE}/config.py": text}).status == OK
    files = {f"{FUSED_MOE}/config.py": f"{text}    outlier: torch.Tensor | None = None\n"}
    assert "'outlier'" in examined(name, tmp_path, files).reason


def test_another_offloader_is_caught(tmp_path):
    name = "offloaders are NoopOffloader, UVAOffloader and PrefetchOffloader"
    text = "class BaseOffloader: ...\n" + "".join(
        f"class {kind}Offloader(BaseOffloader): ...\n" for kind in ("Noop", "UVA", "Prefetch")
    )
    assert examined(name, tmp_path, {"a.py": text}).status == OK
    files = {"b.py": "class DiskOffloader(UVAOffloader): ...\n"}
    assert "DiskOffloader" in examined(name, tmp_path, files).reason


# --- Releases -------------------------------------------------------------------------------

GGUF = "gguf_loader imports it by name"


@pytest.mark.parametrize("version", ["0.21.0", "0.23.0", "0.23.9"])
def test_a_fact_that_ended_is_expected_up_to_its_end(version):
    assert fact(GGUF).expected(version)


@pytest.mark.parametrize("version", ["0.24.0", "0.100.0", "1.0"])
def test_a_fact_that_ended_is_not_expected_later(version):
    assert not fact(GGUF).expected(version)


def test_a_fact_that_ended_is_absent_later(tmp_path):
    assert examined(GGUF, tmp_path, LOADED, "0.24.0").status == ABSENT


def test_a_fact_that_is_so_in_a_release_for_which_it_is_not_stated_is_caught(tmp_path):
    files = {f"{LOADER}/gguf_loader.py": "from .utils import process_weights_after_loading\n"}
    assert examined(GGUF, tmp_path, files, "0.23.0").status == OK
    result = examined(GGUF, tmp_path, files, "0.24.0")
    assert result.status == DIFFERS
    assert result.reason.endswith("gguf_loader.py:1, but is stated for releases to 0.23 only")


# --- What the shim names ------------------------------------------------------------------


def test_every_name_that_the_shim_holds_is_looked_for():
    assert {*vllm_compat.LOADED_HOLDERS, vllm_compat.LOADED_NOT_SERVING} == loading.HOLDERS.keys()
    changes = {*vllm_compat.WEIGHTS_CHANGING, *vllm_compat.WEIGHTS_CHANGED}
    assert changes == loading.CHANGES_SINCE.keys()
    assert served.RELEASES.keys() == vllm_compat.SERVED
    compared = served.COMES_TO.keys() | vllm_compat.ON_CPU | {"TritonOrCutlassExperts"}
    assert compared == vllm_compat.SERVED
    assert vllm_compat.TUNED_BY_EXPERTS <= vllm_compat.TAKE_FEWER_EXPERTS


def test_no_two_facts_have_one_name():
    names = [fact.name for fact in FACTS]
    assert len(names) == len(set(names))
