"""A fault to be caught: the shim does not hear that weights have changed or were wiped."""


def install() -> None:
    from expert_cache_shim import lifecycle

    lifecycle._forget_all = lifecycle._refresh_all = lambda: None
    lifecycle._forget_given = lifecycle._given_weights.clear
