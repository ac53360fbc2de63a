"""Looks at a model inside the process that has it; a module, so that a worker can import it."""


def expert_methods(model) -> list[str]:
    """Class names of the quant methods that serve routed experts."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return sorted({type(method).__name__ for method in methods if hasattr(method, "moe_kernel")})
