"""vLLM's own functions that process a model's weights, of the oldest release and of the newest.

They are taken from the releases' sources and run. What a machine without a GPU lacks is stood in
for: device memory is memory of this machine that is not known as host memory, and a parameter
says that it is on a GPU while weights are processed.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from synthetic import methods
from synthetic.checks import assert_same, outputs
from synthetic.models import MODEL_CONFIG, Model, RoutedExperts, load

from expert_cache_shim import arming, native, reoffload, vllm_compat
from expert_cache_shim.versions import NEWEST_TRIED, OLDEST_TRIED
from tools.vllm_contract.sources import SourcesError, default_cache, fetched

pytest_plugins = ["synthetic.fixtures"]

FLAG = "_vllm_is_uva_offloaded"
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
ONLINE = "vllm.model_executor.layers.quantization.online"


class Device:
    """A GPU that reads host memory by its address, stood in for."""

    def __init__(self) -> None:
        self.host: list[torch.Tensor] = []
        self.at_work = False

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """vLLM's get_accelerator_view_from_cpu_tensor."""
        self.host.append(tensor)
        return tensor

    def pointer_kind(self, address: int) -> int:
        on_host = any(tensor.data_ptr() == address for tensor in self.host)
        return native.HOST_READABLE if on_host else native.DEVICE

    def offload(self, layer: RoutedExperts) -> None:
        """What vLLM's UVAOffloader leaves of a layer before its weights are loaded."""
        packed = isinstance(layer.quant_method, Renamed)
        for name, parameter in list(layer.named_parameters()):
            new = self.parameter(parameter.data, requires_grad=False)
            if name in NAMES:
                self.view(new.data)
                setattr(new, FLAG, True)
            if packed and name in ("w13_weight", "w2_weight"):
                delattr(layer, name)
                name += "_packed"
            setattr(layer, name, new)

    @property
    def parameter(self) -> type:
        return _saying_where(torch.nn.Parameter, self)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(_saying_where(torch.Tensor, self))


def _saying_where(base: type, device: Device) -> type:
    def where(tensor: torch.Tensor) -> torch.device:
        return torch.device("cuda", 0) if device.at_work else torch.device("cpu")

    members = {
        "device": property(where),
        "detach": lambda tensor: base.detach(tensor).as_subclass(type(tensor)),
        "__torch_function__": torch._C._disabled_torch_function_impl,
    }
    return type(base.__name__, (base,), members)


def take(version: str, file: str, namespace: dict, *names: str) -> None:
    """Defines functions of a release's file in a namespace."""
    try:
        path = fetched(version, default_cache()) / file
    except SourcesError as error:
        pytest.skip(str(error))
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert len(tree.body) == len(names)
    later = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(later + tree.body, []), str(path), "exec"), namespace)


@pytest.fixture
def device(library, settings, monkeypatch) -> Device:
    """The emulated kernels, whose driver is asked where an address lies."""
    device = Device()
    monkeypatch.setattr(library, "pointer_kind", device.pointer_kind)
    monkeypatch.setattr(arming, "load_library", lambda where, settings: library)
    return device


@pytest.fixture
def vllm(device, monkeypatch):
    """vllm.model_executor.model_loader.utils of a release, and `replace_parameter` in it."""

    def of(version: str) -> types.ModuleType:
        module = types.ModuleType(vllm_compat.LOADED_SOURCE)
        nothing = type("Nothing", (), {})
        vars(module).update(
            torch=torch, contextmanager=contextlib.contextmanager,
            nullcontext=contextlib.nullcontext,
            envs=SimpleNamespace(VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=True),
            is_pin_memory_available=lambda: False,
            get_accelerator_view_from_cpu_tensor=device.view,
            QuantizeMethodBase=Repacked,
            Attention=nothing, MLAAttention=nothing, MMEncoderAttention=nothing,
            is_deferred_attention_layer=lambda layer: False,
            is_weights_pre_processed=lambda: False,
            maybe_retie_word_embeddings=lambda model, config: None,
            release_device_memory_under_pressure=lambda device: None,
        )  # fmt: skip
        source = "vllm/model_executor/model_loader/utils.py"
        take(version, source, vars(module), vllm_compat.LOADED, vllm_compat.LOADING_CONTEXT)
        take(version, "vllm/model_executor/utils.py", vars(module), "replace_parameter")
        monkeypatch.setitem(sys.modules, vllm_compat.LOADED_SOURCE, module)
        for name, kind in (("fp8", "OnlineLinearBase"), ("moe_base", "OnlineMoEMethodBase")):
            stand_in = SimpleNamespace(**{kind: nothing})
            monkeypatch.setitem(sys.modules, f"{ONLINE}.{name}", stand_in)
        return module

    return of


class Repacked(methods.Int8ChannelMoEMethod):
    """A weight in another type after loading, and a scale that only has other values."""

    requires_device_loading = True

    @staticmethod
    def replace_parameter(layer, name, new):
        """A release's own takes the place of this one."""
        setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))

    def process_weights_after_loading(self, layer):
        for name in NAMES:
            tensor = getattr(layer, name).data
            new = tensor * 2 if name.endswith("scale") else tensor.to(torch.int16)
            self.replace_parameter(layer, name, new)
        super().process_weights_after_loading(layer)


class Renamed(Repacked):
    """Weights that are loaded packed, and have another name when they are repacked: as
    compressed-tensors' NVFP4 method does it."""

    def process_weights_after_loading(self, layer):
        for name in ("w13_weight", "w2_weight"):
            packed = getattr(layer, f"{name}_packed")
            delattr(layer, f"{name}_packed")
            setattr(layer, name, type(packed)(packed.data, requires_grad=False))
        super().process_weights_after_loading(layer)


class Refused(Repacked):
    """A method that the cache does not serve."""

    is_monolithic = True


def model(method: type = Repacked) -> Model:
    return Model(RoutedExperts(method, seed=1), RoutedExperts(method, seed=2))


def process(module: types.ModuleType, device: Device, model: Model, watched: bool) -> None:
    """What a loader calls, with the shim around it or not."""

    def replace(layer, name, new):
        module.replace_parameter(layer, name, device.tensor(new))

    for layer in model.routed:
        device.offload(layer)
    config = SimpleNamespace(**vars(MODEL_CONFIG), quantization=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repacked, "replace_parameter", staticmethod(replace))
        patch.setattr(device, "at_work", True)
        with reoffload.watching(config) if watched else contextlib.nullcontext():
            getattr(module, vllm_compat.LOADED)(model, config, torch.device("cuda"))


def on_host(device: Device, model: Model) -> dict[str, bool]:
    """Where each of the model's expert tensors lies."""
    return {
        f"{number}.{name}": device.pointer_kind(getattr(layer, name).data_ptr()) != native.DEVICE
        for number, layer in enumerate(model.routed)
        for name in NAMES
    }


def flags(model: Model) -> set[bool]:
    return {getattr(getattr(layer, name), FLAG) for layer in model.routed for name in NAMES}


@pytest.mark.parametrize("version", [OLDEST_TRIED, NEWEST_TRIED])
def test_repacked_experts_lie_on_the_host_and_are_served(version, vllm, device, arm, caplog):
    caplog.set_level(logging.INFO)
    loaded = model()
    process(vllm(version), device, loaded, watched=True)
    assert all(on_host(device, loaded).values())
    assert flags(loaded) == {True}
    said = [message for message in caplog.messages if "had repacked them" in message]
    assert len(said) == (version == NEWEST_TRIED)
    assert all("the experts of 2 layers of synthetic" in message for message in said)

    assert len(arm(loaded).armed) == 2
    assert_same(outputs(loaded), outputs(load(model())))


def test_control_the_newest_release_leaves_repacked_experts_in_device_memory(vllm, device, arm):
    """And says "host" of it. Once this fails vLLM was mended, and `reoffload` can go."""
    loaded = model()
    process(vllm(NEWEST_TRIED), device, loaded, watched=False)
    left = {name for name, host in on_host(device, loaded).items() if not host}
    assert left == {f"{layer}.{name}" for layer in (0, 1) for name in ("w13_weight", "w2_weight")}
    assert flags(loaded) == {True}
    ((_, refusal), _) = arm(loaded).refused
    assert refusal.reason == "its weights are resident in device memory"


@pytest.mark.parametrize("version", [OLDEST_TRIED, NEWEST_TRIED])
def test_repacked_experts_with_a_new_name_lie_on_the_host_and_are_served(
    version, vllm, device, arm, caplog
):
    caplog.set_level(logging.INFO)
    loaded = model(Renamed)
    process(vllm(version), device, loaded, watched=True)
    assert all(on_host(device, loaded).values())
    assert flags(loaded) == {True}
    assert any("the experts of 2 layers" in message for message in caplog.messages)

    assert len(arm(loaded).armed) == 2
    assert_same(outputs(loaded), outputs(load(model())))


@pytest.mark.parametrize("version", [OLDEST_TRIED, NEWEST_TRIED])
def test_control_every_release_leaves_what_has_a_new_name_in_device_memory(version, vllm, device):
    loaded = model(Renamed)
    process(vllm(version), device, loaded, watched=False)
    left = {name for name, host in on_host(device, loaded).items() if not host}
    assert left == {f"{layer}.{name}" for layer in (0, 1) for name in ("w13_weight", "w2_weight")}


def left_alone(vllm, device, method: type = Repacked) -> bool:
    """Whether the newest release's weights lie where it left them."""
    loaded = model(method)
    process(vllm(NEWEST_TRIED), device, loaded, watched=True)
    return not on_host(device, loaded)["0.w13_weight"]


def test_control_the_newest_releases_weights_are_not_left_alone(vllm, device):
    assert not left_alone(vllm, device)


@pytest.mark.parametrize("variables", [{"disable": 1}, {"slots": "many"}])
def test_nothing_is_moved_where_the_cache_is_off(vllm, device, settings, variables):
    settings(**variables)
    assert left_alone(vllm, device)


def test_nothing_is_moved_that_the_cache_does_not_serve(vllm, device):
    assert left_alone(vllm, device, Refused)


def test_nothing_is_moved_where_the_library_is_missing(vllm, device, monkeypatch):
    def missing(where, settings):
        raise native.LibraryError("no library")

    monkeypatch.setattr(arming, "load_library", missing)
    assert left_alone(vllm, device)


def test_an_error_nobody_foresaw_leaves_vllm_as_it_was(vllm, device, monkeypatch, caplog):
    monkeypatch.setattr(reoffload, "check_served", lambda *_: 1 // 0)
    assert left_alone(vllm, device)
    assert "ZeroDivisionError" in caplog.text


def test_weights_that_cannot_be_processed_are_vllms_error(vllm, device, monkeypatch):
    module = vllm(NEWEST_TRIED)
    context = getattr(module, vllm_compat.LOADING_CONTEXT)
    monkeypatch.setattr(Repacked, "process_weights_after_loading", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        process(module, device, model(), watched=True)
    assert getattr(module, vllm_compat.LOADING_CONTEXT) is context
