"""Lets vLLM read the graphs that it has compiled for a CPU and kept on disk.

vLLM 0.32 writes them there and fails to read them: it has what it reads finish loading, which
only graphs of its GPU backend can do. It then compiles anew.
"""

import torch


def install() -> None:
    load = torch.compiler.load_compiled_function

    def load_finished(*args, **kwargs):
        loaded = load(*args, **kwargs)
        loaded._artifacts.compiled_fn.finalize_loading = lambda config: None
        return loaded

    torch.compiler.load_compiled_function = load_finished
