"""Measurements of the cache inside real vLLM, and of its kernels alone.

    python -m bench.decode     decode and prefill: resident, offloaded, cached, against the floor
    python -m bench.kernels    `manage` and `gather` alone, under graph replay
    python -m bench.tokens     equal tokens with and without the cache
    python -m bench.schemes    the same for every way in which vLLM quantises experts
    python -m bench.fits       a model that does not fit the GPU
    python -m bench.plot       a picture of what bench.decode wrote

docs/performance.md says how to read them. `--help` lists the options of each.
"""
