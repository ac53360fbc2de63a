"""What a fact is, and what becomes of it in a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .reading import Differs, Found, Release
from .sources import release

OK, DIFFERS, KNOWN, ABSENT = "ok", "differs", "known", "absent"
Check = Callable[[Release], Iterable[Found]]


@dataclass(frozen=True)
class Fact:
    """Something that the shim relies on, and the releases in which it is so.

    Releases are compared by minor version: `until="0.23"` takes in 0.23.1. Outside of them the
    fact must not hold, or what the shim says about versions is wrong. `known` maps releases to
    the reason why a difference there does no harm.
    """

    subject: str
    name: str
    check: Check
    since: str = ""
    until: str = ""
    known: tuple[tuple[str, str], ...] = ()

    def expected(self, version: str) -> bool:
        minor = release(version)[:2]
        first = release(self.since) if self.since else minor
        last = release(self.until) if self.until else minor
        return first <= minor <= last


@dataclass(frozen=True)
class Result:
    """What became of a fact in one release."""

    fact: Fact
    version: str
    status: str
    places: tuple[str, ...] = ()
    reason: str = ""


class Subject:
    """Collects the facts of one subject: `fact = Subject("loading")`, then `@fact("name")`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: list[Fact] = []

    def __call__(
        self, name: str, since: str = "", until: str = "", known: dict[str, str] | None = None
    ) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            versions = tuple((known or {}).items())
            self.facts.append(Fact(self.name, name, check, since, until, versions))
            return check

        return register


def examine(fact: Fact, sources: Release) -> Result:
    """Reads one fact in one release. What the check finds is named by file and line."""
    try:
        found = tuple(piece.place for piece in fact.check(sources))
        if not found:
            raise Differs("nothing of the kind was found")
    except Differs as error:
        return _without(fact, sources.version, str(error))
    if fact.expected(sources.version):
        return Result(fact, sources.version, OK, found)
    bounds = " ".join(f"{w} {v}" for w, v in (("from", fact.since), ("to", fact.until)) if v)
    return Result(
        fact, sources.version, DIFFERS, found, f"is so at {found[0]}, though stated {bounds} only"
    )


def _without(fact: Fact, version: str, reason: str) -> Result:
    if not fact.expected(version):
        return Result(fact, version, ABSENT, reason=reason)
    harmless = dict(fact.known).get(version)
    if harmless:
        return Result(fact, version, KNOWN, reason=f"{reason}; {harmless}")
    return Result(fact, version, DIFFERS, reason=reason)


def require(condition: object, otherwise: str) -> None:
    if not condition:
        raise Differs(otherwise)
