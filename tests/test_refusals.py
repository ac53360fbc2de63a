"""Every reason for which a layer is not armed, and what would change it.

A refused layer is left exactly as it was: the same objects under the same names.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from synthetic import (
    MODEL_CONFIG,
    Model,
    RoutedExperts,
    configs,
    kernels,
    load,
    marlin_methods,
    methods,
    tuning,
)
from synthetic.checks import assert_untouched, model_of, parts

from expert_cache_shim import arming, native, policy, vllm_compat
from expert_cache_shim.installation import build_command

pytest_plugins = ["synthetic.fixtures"]


def test_a_draft_model(refused):
    config = SimpleNamespace(model="synthetic", runner_type="draft")
    assert refused(model_of(), config) == (
        "a draft model's experts are few and resident",
        "nothing needs to change",
    )


def test_a_monolithic_method(refused):
    reason, remedy = refused(model_of(methods.MonolithicMoEMethod))
    assert "MonolithicMoEMethod is monolithic" in reason
    assert "--moe-backend triton" in remedy


def not_proven(name: str) -> str:
    return f"it is not proven that {name} gives the same result wherever an expert lies"


def named(base: type, name: str) -> type:
    """What does the same under another name."""
    return type(name, (base,), {})


def computed_by(experts: type) -> type[methods.UnquantizedFusedMoEMethod]:
    class Method(methods.UnquantizedFusedMoEMethod):
        def make_experts(self, layer):
            return experts(self.moe, self.moe_quant_config)

    return Method


@pytest.mark.parametrize("name", ["FlashInferExperts", "DeepGemmExperts", "MyTritonExperts"])
def test_a_kernel_that_is_not_proven(refused, arm, name):
    """One derived from a proven kernel, and with its `apply`, is none."""
    reason, remedy = refused(model_of(computed_by(named(kernels.TritonExperts, name))))
    assert reason == not_proven(name)
    assert "--moe-backend" in remedy and "triton" in remedy and "marlin" in remedy
    model = model_of(computed_by(kernels.TritonExperts))
    assert len(arm(model).armed) == len(model.routed)


def test_a_kernel_of_aiter(refused):
    reason, remedy = refused(model_of(computed_by(kernels.AiterExperts)))
    assert reason == not_proven("AiterExperts")
    assert "VLLM_ROCM_USE_AITER_MOE=0" in remedy


def test_a_method_without_a_kernel_that_is_not_proven(refused, arm):
    method = methods.QuarkW8A8Int8MoEMethod
    reason, remedy = refused(model_of(named(method, "GGUFMoEMethod")))
    assert reason == not_proven("GGUFMoEMethod")
    assert "quantisation" in remedy
    model = model_of(named(method, method.__name__))
    assert len(arm(model).armed) == len(model.routed)


@pytest.mark.parametrize("marlin", [False, True])
def test_a_method_that_may_choose_aiter(refused, arm, marlin):
    class QuarkW8A8Fp8MoEMethod(marlin_methods.QuarkW8A8Fp8MoEMethod):
        use_marlin = marlin
        rocm_aiter_moe_enabled = True

    reason, remedy = refused(model_of(QuarkW8A8Fp8MoEMethod))
    assert reason == not_proven("QuarkW8A8Fp8MoEMethod")
    assert "VLLM_ROCM_USE_AITER_MOE=0" in remedy
    QuarkW8A8Fp8MoEMethod.rocm_aiter_moe_enabled = False
    model = model_of(QuarkW8A8Fp8MoEMethod)
    assert len(arm(model).armed) == len(model.routed)


@pytest.mark.parametrize(
    "method", [methods.CompressedTensorsWNA16MoEMethod, methods.MoeWNA16Method]
)
def test_a_method_that_has_another_kernel_on_nvidia(refused, arm, monkeypatch, method):
    platform = SimpleNamespace(is_cuda=lambda: True)
    fake_vllm(monkeypatch, "vllm.platforms", current_platform=platform)
    reason, _ = refused(model_of(method))
    assert reason == not_proven(method.__name__)
    model = model_of(methods.QuarkW8A8Int8MoEMethod)
    assert len(arm(model).armed) == len(model.routed)
    platform.is_cuda = lambda: False
    model = model_of(method)
    assert len(arm(model).armed) == len(model.routed)


def test_lora(refused):
    model = model_of()
    for layer in model.routed:
        layer.moe_config.is_lora_enabled = True
    assert refused(model) == ("LoRA kernels index by expert id", "serve without --enable-lora")


@pytest.mark.parametrize("where", ["layer", "parallel config"])
def test_expert_load_balancing(refused, where):
    model = model_of()
    for layer in model.routed:
        if where == "layer":  # 0.21-0.23
            layer.enable_eplb = True
        else:
            layer.moe_config.moe_parallel_config.enable_eplb = True
    reason, remedy = refused(model)
    assert "EPLB" in reason
    assert "--enable-eplb" in remedy


@pytest.mark.parametrize(
    "parallel", [SimpleNamespace(enable_dbo=True), SimpleNamespace(ubatch_size=2)]
)
@pytest.mark.parametrize("module", ["vllm.config.vllm", "vllm.config"])
def test_dual_batch_overlap(refused, monkeypatch, parallel, module):
    fake_vllm(
        monkeypatch, module,
        get_current_vllm_config_or_none=lambda: SimpleNamespace(parallel_config=parallel),
    )  # fmt: skip
    reason, remedy = refused(model_of())
    assert "dual batch overlap" in reason
    assert "--enable-dbo" in remedy


def test_no_overlap_is_no_reason(arm, monkeypatch):
    parallel = SimpleNamespace(enable_dbo=False, ubatch_size=0)
    fake_vllm(
        monkeypatch, "vllm.config.vllm",
        get_current_vllm_config_or_none=lambda: SimpleNamespace(parallel_config=parallel),
    )  # fmt: skip
    assert arm(model_of()).armed


def test_a_configuration_that_cannot_be_asked_for_is_no_reason(arm, monkeypatch):
    def fail():
        raise AssertionError("Current vLLM config is not set.")

    fake_vllm(monkeypatch, "vllm.config.vllm", get_current_vllm_config=fail)
    assert arm(model_of()).armed


def fake_vllm(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_data_parallel_routing(refused):
    model = model_of()
    for layer in model.routed:
        impl = layer.quant_method.moe_kernel.impl
        impl.prepare_finalize = kernels.MoEPrepareAndFinalizeNaiveDPEPModular()
    reason, remedy = refused(model)
    assert "MoEPrepareAndFinalizeNaiveDPEPModular moves routing ids between ranks" in reason
    assert "one data-parallel rank" in remedy


@pytest.mark.parametrize("where", ["moe_config", "layer"])
def test_data_parallel_routing_of_a_method_without_a_kernel(refused, where):
    model = model_of(methods.QuarkW8A8Int8MoEMethod)
    parallel = configs.FusedMoEParallelConfig(dp_size=2)
    for layer in model.routed:
        if where == "layer":  # 0.21-0.23
            layer.moe_parallel_config = parallel
            layer.moe_config.moe_parallel_config = None
        else:
            layer.moe_config.moe_parallel_config = parallel
    reason, remedy = refused(model)
    assert "data parallelism" in reason
    assert "one data-parallel rank" in remedy


def test_apply_replaced_by_another_package(refused):
    model = model_of(count=1)
    theirs = model.routed[0].quant_method.apply = lambda **arguments: None
    reason, remedy = refused(model)
    assert "another package has replaced apply()" in reason
    assert "remove one of the two" in remedy
    assert model.routed[0].quant_method.apply is theirs


@pytest.mark.parametrize("experts", [1, 1025])
def test_a_number_of_experts_that_the_kernels_do_not_serve(refused, settings, experts):
    settings(slots=1)
    model = load(Model(RoutedExperts(experts=experts, hidden=8, intermediate=4, top_k=1)))
    reason, _ = refused(model)
    assert reason == f"it has {experts} experts; the cache serves 2 to 1024"


def test_a_weight_that_is_not_expert_major(refused):
    model = model_of(count=1)
    layer = model.routed[0]
    interleaved = layer.w2_weight.transpose(0, 1).contiguous().transpose(0, 1)
    layer.w2_weight = methods.parameter(interleaved)
    reason, remedy = refused(model)
    assert "w2_weight of shape (8, 32, 64)" in reason
    assert "does not keep each expert's values together" in reason
    assert "--moe-backend" in remedy


def test_a_weight_whose_experts_are_not_the_first_dimension(refused):
    model = model_of(count=1)
    layer = model.routed[0]
    layer.w2_weight = methods.parameter(layer.w2_weight.transpose(0, 1).contiguous())
    reason, remedy = refused(model)
    assert reason == "w2_weight is per-expert data that the cache cannot stand in for"
    assert "--moe-backend" in remedy


def test_offloading_without_unified_addressing(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason, remedy = refused(model_of())
    assert "non-UVA" in reason
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" in remedy
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY" in remedy


def test_the_prefetch_offloader(refused, monkeypatch):
    offloader = type("PrefetchOffloader", (), {})()
    fake_vllm(monkeypatch, "vllm.model_executor.offloader.base", get_offloader=lambda: offloader)
    reason, remedy = refused(model_of())
    assert "prefetch offloader" in reason
    assert "--offload-backend uva" in remedy


@pytest.mark.parametrize("name", ["NoopOffloader", "UVAOffloader"])
def test_other_offloaders_are_no_reason(arm, monkeypatch, name):
    offloader = type(name, (), {})()
    fake_vllm(monkeypatch, "vllm.model_executor.offloader.base", get_offloader=lambda: offloader)
    assert arm(model_of()).armed


@pytest.mark.parametrize("value", [None, "0"])
def test_a_cpu_that_was_not_allowed(refused, settings, value):
    settings(allow_cpu=value)
    reason, remedy = refused(model_of())
    assert "runs on a CPU" in reason
    assert "EXPERT_CACHE_ALLOW_CPU=1" in remedy


def test_weights_that_are_not_loaded(refused):
    model = model_of(count=1)
    layer = model.routed[0]
    layer.w2_weight = methods.parameter(layer.w2_weight.to("meta"))
    reason, remedy = refused(model)
    assert "meta" in reason
    assert "load real weights" in remedy


def test_resident_weights(refused, library, monkeypatch):
    monkeypatch.setattr(library, "pointer_kind", lambda address: native.DEVICE)
    reason, remedy = refused(model_of())
    assert reason == "its weights are resident in device memory"
    assert "--cpu-offload-gb" in remedy
    assert "--cpu-offload-params experts" in remedy


def test_host_memory_that_the_gpu_cannot_read(refused, library, monkeypatch):
    model = model_of(count=1)
    unreadable = model.routed[0].w2_weight.data_ptr()

    def pointer_kind(address):
        return native.HOST_UNREADABLE if address == unreadable else native.HOST_READABLE

    monkeypatch.setattr(library, "pointer_kind", pointer_kind)
    reason, _ = refused(model)
    assert reason == "w2_weight lies in host memory that the GPU cannot read"


def test_only_the_offloaded_layers_of_a_model_are_armed(arm, library, monkeypatch):
    model = model_of(methods.Int8ChannelMoEMethod, methods.Int8ChannelMoEMethod)
    resident = {t.data_ptr() for t in model.routed[1].parameters()}
    # The last offloaded layer has a part of it in device memory, the first resident one its scales
    # on the host: what the budget of --cpu-offload-gb leaves behind.
    resident.add(model.routed[0].w2_weight.data_ptr())
    resident.discard(model.routed[1].w13_weight_scale.data_ptr())
    monkeypatch.setattr(
        library, "pointer_kind",
        lambda address: native.DEVICE if address in resident else native.HOST_READABLE,
    )  # fmt: skip
    report = arm(model)
    assert [armed.name for armed in report.armed] == ["layers.0.experts.routed_experts"]
    assert [str(r.reason) for _, r in report.refused] == [
        "its weights are resident in device memory"
    ]


@pytest.mark.parametrize("slots", [8, 9, 4000])
def test_slots_for_every_expert(refused, settings, slots):
    settings(slots=slots)
    reason, remedy = refused(model_of())
    assert f"{slots} slots hold all of its 8 experts" in reason
    assert "EXPERT_CACHE_SLOTS" in remedy


def test_a_setting_that_is_not_allowed(refused, settings):
    settings(policy="belady")
    reason, remedy = refused(model_of())
    assert "EXPERT_CACHE_POLICY='belady': allowed is one of lrfu" in reason
    assert remedy


def test_a_budget_that_pays_for_no_slot(refused, settings):
    settings(slots=None, gib=0.000001)
    reason, _ = refused(model_of())
    assert "EXPERT_CACHE_GIB=1e-06 pays for no slot" in reason


def test_a_library_that_is_missing(settings, monkeypatch, tmp_path):
    settings(lib=tmp_path / "none.so")
    model = model_of()
    before = parts(model)
    report = arming.arm_model(model, MODEL_CONFIG)
    ((reason, remedy),) = {(r.reason, r.remedy) for _, r in report.refused}
    assert reason.startswith(f"{tmp_path}/none.so: No such file")
    assert f"run `{build_command('host')}`" in reason
    assert remedy == "the model serves without the cache"
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (methods.Fp8CutlassMoEMethod, "CutlassExpertsFp8"),
        (methods.Fp8FallbackMoEMethod, "TritonOrCutlassExperts"),
        (methods.QuarkW8A8Int8MoEMethod, "QuarkW8A8Int8MoEMethod"),
    ],
)
def test_plain_storage_for_a_kernel_not_known_to_take_fewer_experts(
    refused, settings, method, name
):
    settings(storage="plain")
    reason, remedy = refused(model_of(method))
    assert f"{name} is not known to run with fewer experts" in reason
    assert "EXPERT_CACHE_STORAGE=virtual" in remedy


def test_plain_storage_for_a_kernel_whose_tuned_configuration_cannot_be_kept(
    refused, settings, monkeypatch
):
    settings(storage="plain")
    monkeypatch.delattr(tuning.fused_moe, "try_get_optimal_moe_config")
    reason, remedy = refused(model_of())
    assert "tuned" in reason
    assert "EXPERT_CACHE_STORAGE=virtual" in remedy


def test_a_graph_compiled_on_a_cpu_for_steps_wider_than_the_kernels_take(
    refused, settings, arm, monkeypatch
):
    monkeypatch.setattr(vllm_compat, "compiles_on_cpu", lambda: True)
    tokens = policy.MAX_IDS // 2  # of two experts each
    monkeypatch.setattr(vllm_compat, "most_tokens", lambda: tokens + 1)
    reason, remedy = refused(model_of())
    assert f"a step may have {policy.MAX_IDS + 2} routing ids" in reason
    assert "--max-num-batched-tokens" in remedy and "--enforce-eager" in remedy
    monkeypatch.setattr(vllm_compat, "most_tokens", lambda: tokens)
    model = model_of()
    assert len(arm(model).armed) == 2


@pytest.mark.parametrize("wanted", ["auto", "virtual"])
def test_without_virtual_memory_plain_storage_serves_and_a_line_says_why(
    arm, settings, library, monkeypatch, caplog, wanted
):
    def refuse(device):
        raise native.KernelError("expert_cache_memory_granularity", -13, "not supported")

    settings(storage=wanted)
    monkeypatch.setattr(library, "granularity", refuse)
    report = arm(model_of())
    assert {armed.cache.storage.kind for armed in report.armed} == {"plain"}
    assert "no virtual memory management here" in caplog.text
    assert "not supported" in caplog.text
