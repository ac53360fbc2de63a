"""A fault to be caught: the shim does not hear that weights have changed or were wiped."""

from unittest import mock


def install() -> None:
    from expert_cache_shim import lifecycle

    # patch() and not an assignment: a name that is there no more is an error.
    for name in ("_forget", "_refresh"):
        mock.patch.object(lifecycle, name, lambda worker: None).start()
    mock.patch.object(lifecycle, "_forget_given", lifecycle._given_weights.clear).start()
