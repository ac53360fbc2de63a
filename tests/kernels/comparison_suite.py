"""Every comparison of kernels and references, once: `python comparison_suite.py LIBRARY.so`.

Exit status 0 and the line "equal" when all agree; 3 and the first difference when not. A process
of its own, because a faulty kernel may also abort the emulator.
"""

import sys
from itertools import islice

import numpy as np
import routing
from compared_layer import ComparedLayer, Difference
from compared_tensors import (
    ComparedTensors,
    Shape,
    copies_to_rows,
    copies_to_scratch,
    state_with,
)

from expert_cache_shim.native import Library, load
from expert_cache_shim.policy import CODES

EXIT_DIFFERENT = 3


def compare_manage(library: Library, policy: str) -> None:
    generator = np.random.default_rng(9)
    for experts, slots in [(16, 5), (128, 32)]:
        layer = ComparedLayer(library, experts, slots, policy)
        for kind in routing.KINDS.values():
            for ids in islice(kind(generator, experts), 10):
                layer.step(ids, generator.choice(["rows", "scratch"]))
        for ids in islice(routing.KINDS["random"](generator, experts), 10):
            layer.preload()
            layer.step(ids, preloaded=True)
        dirty = generator.integers(0, experts, (4, 4)) + (generator.integers(0, 2, (4, 4)) << 32)
        layer.step(dirty)


def compare_mapped(library: Library, policy: str) -> None:
    generator = np.random.default_rng(9)
    for placement in routing.PLACEMENTS.values():
        layer = ComparedLayer(library, 16, 5, policy, expert_map=placement(generator, 16))
        for ids in islice(routing.independent(generator, len(layer.reference.expert_map)), 10):
            layer.step(ids, generator.choice(["rows", "scratch"]))


def compare_gather(library: Library) -> None:
    generator = np.random.default_rng(9)
    shapes = [Shape(4096, 4096), Shape(4100, 4112), Shape(17, 17, 1), Shape(38, 40, 4)]
    for copies, scratch in [
        (copies_to_rows(generator, 9, 8), False),
        (copies_to_scratch(generator, 9, 8), True),
    ]:
        tensors = ComparedTensors.filled(9, shapes, scratch)
        tensors.gather(library, copies, state_with(copies, 9))


def main(path: str) -> int:
    library = load("host", path)
    try:
        for seed in (0, 5, 11):
            library.shuffle(seed)
            for policy in CODES:
                compare_manage(library, policy)
                compare_mapped(library, policy)
            compare_gather(library)
    except Difference as difference:
        print(difference)
        return EXIT_DIFFERENT
    print("equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
