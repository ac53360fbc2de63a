"""Reads the sources of vLLM releases and checks in them what the shim relies on.

Nothing of vLLM is imported or installed, and of each wheel only some of the Python files are
transferred. `python -m tools.vllm_contract --help` says how to use it.
"""
