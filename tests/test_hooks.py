"""The import hooks on a package that is built like vLLM, in processes of their own.

The fake `vllm` has vLLM's modules, and its loader takes `process_weights_after_loading` by name.
wrapt is the real one. A stand-in for `arming` notes what it is asked to arm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LOADER = "vllm/model_executor/model_loader"
FILES = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_worker.py": """
        class Worker:
            def compile_or_warm_up_model(self):
                return "warm"

            def execute_model(self, output):
                return output
        """,
    "vllm/v1/metrics/__init__.py": "",
    "vllm/v1/metrics/prometheus.py": """
        from prometheus_client import REGISTRY

        def page():
            from prometheus_client import generate_latest

            return generate_latest(REGISTRY).decode()
        """,
    "vllm/model_executor/__init__.py": "",
    f"{LOADER}/__init__.py": "",
    f"{LOADER}/weight_cache/__init__.py": "",
    f"{LOADER}/utils.py": """
        def process_weights_after_loading(model, model_config, target_device):
            model.append(("processed", model_config, target_device))
            return "result"
        """,
}
HOLDER = """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    def load(model):
        return process_weights_after_loading(model, "config", "cpu")
    """
HOLDERS = {
    "base_loader": "vllm.model_executor.model_loader.base_loader",
    "gguf_loader": "vllm.model_executor.model_loader.gguf_loader",
    "ipc_loader": "vllm.model_executor.model_loader.weight_cache.ipc_loader",
    "daemon": "vllm.model_executor.model_loader.weight_cache.daemon",
    "plugin": "gguf_plugin.loader",
}

# What every script starts with: `load(holder)` is one model loaded by that module, and prints how
# often it was processed and armed.
PRELUDE = """
    import importlib, json, sys, types

    ARMED = []
    arming = types.ModuleType("expert_cache_shim.arming")

    def arm_model(model, config):
        ARMED.append((model, config))
        return types.SimpleNamespace(armed=[])

    arming.arm_model = arm_model
    arming.reports = lambda: iter(())
    sys.modules["expert_cache_shim.arming"] = arming

    UTILS = "vllm.model_executor.model_loader.utils"
    HOLDERS = json.loads(HOLDERS)

    def take(name):
        return importlib.import_module(HOLDERS[name])

    def load(module):
        model, before = [], len(ARMED)
        assert module.load(model) == "result"
        armed = ARMED[before:]
        assert all(m is model and config == "config" for m, config in armed)
        return [len(model), len(armed)]

    def say(*values):
        print(json.dumps(values))

    from expert_cache_shim import hooks
    """


@pytest.fixture
def python(tmp_path):
    """Runs a script beside the fake vLLM; returns what it said with `say`, and its stderr."""
    files = dict(FILES)
    for name in HOLDERS.values():
        files[name.replace(".", "/") + ".py"] = HOLDER
    files["gguf_plugin/__init__.py"] = ""
    files["torch.py"] = ""  # nothing here computes
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def run(script: str) -> tuple[list, str]:
        prelude = f"HOLDERS = {json.dumps(HOLDERS)!r}\n" + textwrap.dedent(PRELUDE)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EXPERT_CACHE_")}
        environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(script)],
            capture_output=True, text=True, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    return run


ONCE = [1, 1]  # processed and armed
NOT_ARMED = [1, 0]


# --- Order of events ------------------------------------------------------------------------


def test_registered_before_vllm_is_imported(python):
    said, _ = python("""
        hooks.register()
        say(*(load(take(name)) for name in ("base_loader", "gguf_loader", "ipc_loader", "plugin")))
        """)
    assert said == [[ONCE] * 4]


def test_registered_after_vllm_is_imported(python):
    said, _ = python("""
        modules = [take(name) for name in ("base_loader", "gguf_loader", "ipc_loader", "plugin")]
        hooks.register()
        say(*(load(module) for module in modules))
        """)
    assert said == [[ONCE] * 4]


def test_registered_between_the_source_and_its_holders(python):
    said, _ = python("""
        importlib.import_module(UTILS)
        early = take("plugin")
        hooks.register()
        say(load(early), load(take("base_loader")), load(take("ipc_loader")))
        """)
    assert said == [[ONCE] * 3]


def test_registered_twice(python):
    said, _ = python("""
        early = take("base_loader")
        hooks.register()
        hooks.register()
        say(load(early), load(take("plugin")))
        """)
    assert said == [[ONCE] * 2]


def test_a_call_through_the_module_is_armed(python):
    said, _ = python("""
        hooks.register()
        utils = importlib.import_module(UTILS)
        model = []
        say(utils.process_weights_after_loading(model, model_config="config", target_device="cpu"))
        utils.process_weights_after_loading(model=model, model_config="config", target_device="x")
        say(len(model), len(ARMED), all(m is model for m, _ in ARMED), [c for _, c in ARMED])
        """)
    assert said == [["result"], [2, 2, True, ["config", "config"]]]


def test_a_holder_that_took_the_function_and_is_found_under_two_names(python):
    said, _ = python("""
        early = take("plugin")
        sys.modules["alias.of.plugin"] = early
        hooks.register()
        say(load(early))
        """)
    assert said == [[ONCE]]


def test_modules_that_are_strange_do_not_stop_the_search(python):
    said, _ = python("""
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise RuntimeError(f"{name} of a lazy module was asked for")

        class Slots:
            __slots__ = ()

        early = take("plugin")
        sys.modules = {
            "none": None, "lazy": Lazy("lazy"), "slots": Slots(), "int": 3, **sys.modules
        }
        hooks.register()
        say(load(early))
        """)
    assert said == [[ONCE]]


# --- The process that only holds weights ----------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_weight_cache_daemon_is_spared(python, order):
    said, _ = python(f"""
        daemon = take("daemon") if {order == "after"} else None
        hooks.register()
        say(load(daemon or take("daemon")), load(take("base_loader")))
        """)
    assert said == [[NOT_ARMED, ONCE]]


# --- Reload ---------------------------------------------------------------------------------


def test_a_loader_that_is_reloaded_stays_hooked(python):
    said, _ = python("""
        hooks.register()
        loader = take("base_loader")
        say(load(importlib.reload(loader)))
        """)
    assert said == [[ONCE]]


def test_a_source_that_is_reloaded_leaves_its_holders_hooked(python):
    said, _ = python("""
        hooks.register()
        loader = take("base_loader")
        importlib.reload(sys.modules[UTILS])
        say(load(loader))
        """)
    assert said == [[ONCE]]


# --- Other packages -------------------------------------------------------------------------

WRAP = """
    import functools

    THEIRS = []

    def wrap(function):
        @functools.wraps(function)
        def theirs(*args, **kwargs):
            THEIRS.append(1)
            return function(*args, **kwargs)
        return theirs

    def patch(module):
        module.process_weights_after_loading = wrap(module.process_weights_after_loading)
    """


def test_another_package_wraps_the_source_before_us(python):
    said, _ = python(textwrap.dedent(WRAP) + textwrap.dedent("""
        patch(importlib.import_module(UTILS))
        hooks.register()
        say(load(take("base_loader")), len(THEIRS))
        """))  # fmt: skip
    assert said == [[ONCE, 1]]


def test_another_package_wraps_the_source_after_us(python):
    said, _ = python(textwrap.dedent(WRAP) + textwrap.dedent("""
        hooks.register()
        patch(importlib.import_module(UTILS))
        say(load(take("base_loader")), len(THEIRS), load(take("daemon")))
        """))  # fmt: skip
    assert said == [[ONCE, 1, ONCE]]


def test_another_package_wraps_the_source_after_a_holder_took_it(python):
    said, _ = python(textwrap.dedent(WRAP) + textwrap.dedent("""
        early = take("base_loader")
        patch(sys.modules[UTILS])
        hooks.register()
        say(load(early), len(THEIRS), load(take("plugin")), len(THEIRS))
        """))  # fmt: skip
    assert said == [[ONCE, 0, ONCE, 1]]


def test_another_package_wraps_the_holder_alone(python):
    said, _ = python(textwrap.dedent(WRAP) + textwrap.dedent("""
        early = take("base_loader")
        patch(early)
        hooks.register()
        say(load(early), len(THEIRS))
        """))  # fmt: skip
    assert said == [[ONCE, 1]]


def test_another_package_wraps_source_and_holder_each(python):
    said, _ = python(textwrap.dedent(WRAP) + textwrap.dedent("""
        early = take("base_loader")
        patch(early)
        patch(sys.modules[UTILS])
        hooks.register()
        say(load(early), load(take("plugin")), len(THEIRS))
        """))  # fmt: skip
    assert said == [[ONCE, ONCE, 2]]


def test_another_package_uses_wrapt_before_and_after_us(python):
    said, _ = python("""
        import wrapt
        THEIRS = []

        def theirs(wrapped, instance, args, kwargs):
            THEIRS.append(1)
            return wrapped(*args, **kwargs)

        importlib.import_module(UTILS)
        wrapt.wrap_function_wrapper(UTILS, "process_weights_after_loading", theirs)
        hooks.register()
        wrapt.wrap_function_wrapper(UTILS, "process_weights_after_loading", theirs)
        say(load(take("base_loader")), len(THEIRS))
        """)
    assert said == [[ONCE, 2]]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hook_of_another_package_that_raises_does_so_as_without_us(python, order):
    """wrapt passes it on to whoever imports, and has then used up all hooks of that module."""
    said, errors = python(f"""
        import wrapt

        def fail(module):
            raise RuntimeError("theirs")

        steps = [hooks.register, lambda: wrapt.register_post_import_hook(fail, UTILS)]
        for step in steps[:: {-1 if order == "before" else 1}]:
            step()
        try:
            importlib.import_module(UTILS)
        except RuntimeError as error:
            say(str(error))
        say(load(take("base_loader"))[0])
        """)
    assert said == [["theirs"], [1]]
    assert errors == ""


# --- The server's metrics -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_server_that_answers_metrics_has_the_counters_among_them(python, tmp_path, order):
    said, errors = python(f"""
        import os
        from pathlib import Path
        os.environ["EXPERT_CACHE_SNAPSHOT"] = {str(tmp_path / "counters")!r}
        name, late = "vllm.v1.metrics.prometheus", {order == "before"}
        early = None if late else importlib.import_module(name)
        hooks.register()
        server = early or importlib.import_module(name)
        before = "expert_cache" in server.page()
        from expert_cache_shim.telemetry import SnapshotFile
        SnapshotFile(Path({str(tmp_path / "counters")!r}), "model", 0, [])
        say(before, 'expert_cache_armed_layers{{model="model",rank="0"}} 0.0' in server.page())
        say("torch" in sys.modules)
        """)
    assert said == [[False, True], [False]]
    assert errors == ""


# --- Failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook",
    [
        "_rebind_loaded", "_rebind_holder", "_spare_daemon", "_watch_worker", "_rebind",
        "_export_metrics",
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hook_that_fails_leaves_vllm_working(python, hook, order):
    said, errors = python(f"""
        def fail(*args):
            raise RuntimeError("nobody foresaw this")

        hooks.{hook} = fail
        names = ["base_loader", "plugin", "daemon"]
        early = [take(name) for name in names] if {order == "after"} else []
        if early:
            importlib.import_module("vllm.v1.worker.gpu_worker")
        hooks.register()
        modules = early or [take(name) for name in names]
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker()
        importlib.import_module("vllm.v1.metrics.prometheus").page()
        say([load(module)[0] for module in modules], worker.execute_model(5))
        say(worker.compile_or_warm_up_model())
        """)
    assert said == [[[1, 1, 1], 5], ["warm"]]
    assert "expert cache: could not hook vllm." in errors
    assert "nobody foresaw this" in errors


def test_arming_that_fails_leaves_the_model_loaded(python):
    said, errors = python("""
        def fail(model, config):
            raise RuntimeError("nobody foresaw this")

        arming.arm_model = fail
        hooks.register()
        say(load(take("base_loader")))
        """)
    assert said == [[NOT_ARMED]]
    assert "expert cache: cannot arm" in errors


def test_arming_that_cannot_be_imported_leaves_the_model_loaded(python):
    said, errors = python("""
        sys.modules["expert_cache_shim.arming"] = None
        hooks.register()
        say(load(take("base_loader")))
        """)
    assert said == [[NOT_ARMED]]
    assert "expert cache: cannot arm" in errors


def test_an_error_of_vllms_own_is_passed_on_and_nothing_is_armed(python):
    said, errors = python("""
        hooks.register()
        loader = take("base_loader")
        try:
            loader.load(None)
        except AttributeError as error:
            say(str(error), len(ARMED))
        """)
    assert said == [["'NoneType' object has no attribute 'append'", 0]]
    assert errors == ""


def test_a_vllm_without_the_function_is_told_of_once(python, tmp_path):
    (tmp_path / LOADER / "utils.py").write_text("renamed = 1\n")
    said, errors = python("""
        hooks.register()
        say(importlib.import_module(UTILS).renamed)
        """)
    assert said == [[1]]
    assert errors.count("has no process_weights_after_loading in this vLLM") == 1


# --- What it costs --------------------------------------------------------------------------


def test_registering_imports_nothing_of_vllm_or_torch(python, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    said, _ = python("""
        hooks.register()
        say(sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")))
        """)
    assert said == [[[]]]


def test_the_functions_of_vllm_keep_their_names_and_signatures(python):
    said, _ = python("""
        import inspect
        hooks.register()
        function = take("base_loader").process_weights_after_loading
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
        say(function.__name__, list(inspect.signature(function).parameters))
        say(worker.execute_model.__name__, worker().execute_model(3))
        """)
    assert said == [
        ["process_weights_after_loading", ["model", "model_config", "target_device"]],
        ["execute_model", 3],
    ]
