"""What `expert-cache` does, one module a command and the questions they share.

These modules need the standard library only: an image is looked after before it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One option of a command, in the annotation of the parameter that takes its value.

    A parameter is a bool (a flag), a str, int or float, or None (one value), or a list of str (any
    number). A `flag` that does not begin with a dash is the name of an argument without one.
    """

    flag: str
    help: str
    metavar: str | None = None

    @property
    def positional(self) -> bool:
        return not self.flag.startswith("-")


class CommandError(Exception):
    """The command cannot do what it was asked to. One line: what is in the way, the remedy."""
