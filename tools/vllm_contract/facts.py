"""What a fact is, and what becomes of it in a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .reading import Differs, Found, Release
from .sources import release

OK, DIFFERS, ABSENT = "ok", "differs", "absent"
Check = Callable[[Release], Iterable[Found]]


@dataclass(frozen=True)
class Fact:
    """Something that the shim relies on, and the releases in which it is so.

    Releases are compared by minor version: `until="0.23"` takes in 0.23.1. Outside of them the
    fact must not hold, or what the shim says about versions is wrong.
    """

    subject: str
    name: str
    check: Check
    since: str = ""
    until: str = ""

    @property
    def stated(self) -> str:
        """The releases in which it is expected, in words."""
        if self.since and self.until:
            return f"{self.since} to {self.until}"
        if self.since:
            return f"from {self.since}"
        return f"to {self.until}" if self.until else "all"

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

    def __call__(self, name: str, since: str = "", until: str = "") -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            self.facts.append(Fact(self.name, name, check, since, until))
            return check

        return register


def examine(fact: Fact, sources: Release) -> Result:
    """Reads one fact in one release. What the check finds is named by file and line."""
    expected = fact.expected(sources.version)
    try:
        found = tuple(piece.place for piece in fact.check(sources))
        if not found:
            raise Differs("nothing of the kind was found")
    except Differs as error:
        status = DIFFERS if expected else ABSENT
        return Result(fact, sources.version, status, reason=str(error))
    if expected:
        return Result(fact, sources.version, OK, found)
    reason = f"is so at {found[0]}, but is stated for releases {fact.stated} only"
    return Result(fact, sources.version, DIFFERS, found, reason)


def require(condition: object, otherwise: str) -> None:
    if not condition:
        raise Differs(otherwise)
