"""Layers that look to the shim like vLLM's, and compute a real mixture of experts.

Class and attribute names, the chain method -> kernel -> impl -> experts -> config -> descriptors
and the call of `apply` are those of vLLM 0.21 to 0.33 (`FusedMoE` or `RoutedExperts`). What the
experts compute is plain torch. Sizes are small; every large record still spans more than one
page, so that the host's virtual memory aliases for real.
"""

from .models import MODEL_CONFIG, Model, RoutedExperts, call, load, routing

__all__ = ["MODEL_CONFIG", "Model", "RoutedExperts", "call", "load", "routing"]
