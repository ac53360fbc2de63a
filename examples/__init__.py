"""Tiny models, and scripts that serve one.

A package, so that a folder of this name in another place of the search path is not taken for it.
"""
