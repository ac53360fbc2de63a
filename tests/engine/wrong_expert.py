"""A fault to be caught: every copy fetches the expert after the one it should.

A test that compares tokens proves nothing unless wrong experts change them.
"""

import ctypes


def install() -> None:
    from expert_cache_shim import native

    gather = native.Library.gather

    def gather_next_expert(library, args, stream=0):
        # The copies that manage wrote: {expert, from_slot, to_row, to_slot} each.
        words = ctypes.cast(args.state, ctypes.POINTER(ctypes.c_int32))
        first = native.STATE_HEADER + 4 * args.experts
        for expert in range(first, first + 4 * words[1], 4):
            words[expert] = (words[expert] + 1) % args.experts
        gather(library, args, stream)

    native.Library.gather = gather_next_expert
