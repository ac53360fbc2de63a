"""A cache of mixture-of-experts weights in device memory for vLLM's host-offloaded experts.

Importing the package does nothing and costs nothing: every Python process of a machine that has
the shim imports it at start. `bootstrap` is where it begins.
"""

__version__ = "0.1.0"
