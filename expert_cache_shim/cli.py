"""The command `expert-cache`.

A command is a plain function in `commands`: it takes options as parameters, prints, and returns
the exit status. Its signature is the one description of its options. Where typer is installed (the
extra `tools`) it reads them; where it is not, in an image without network, argparse does. Commands
of one matter are a group, called by two words.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from . import __version__
from .commands import CommandError, Option
from .commands.build import build
from .commands.doctor import doctor
from .commands.plan import plan
from .commands.start_up import disable, enable
from .commands.status import status
from .commands.trace import info, replay
from .commands.trace_import import import_
from .commands.trace_plot import plot
from .commands.trace_record import record
from .installation import invocation
from .untrusted import printable

COMMANDS: tuple[Callable[..., int], ...] = (build, enable, disable, doctor, plan, status)
GROUPS: dict[str, tuple[str, tuple[Callable[..., int], ...]]] = {
    "trace": (
        "Recorded routing: look at it, and count what a cache would miss.",
        (record, import_, info, replay, plot),
    ),
}
ABOUT = "Looks after the expert cache of vLLM: its kernels, its start with Python, its state."
MORE = "pip install 'expert-cache-shim[tools]' brings the packages that all commands together need"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` are those of the process unless given. Its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import typer
    except ImportError:
        typer = None
    return _run_typer(typer, words) if typer else _run_plain(words)


class Parameter(NamedTuple):
    """One option of a command, as its signature gives it."""

    name: str
    type: Any
    default: Any
    option: Option


def parameters(command: Callable[..., int]) -> Iterator[Parameter]:
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, option = get_args(parameter.annotation)
        yield Parameter(name, kind, parameter.default, option)


def word(command: Callable[..., int]) -> str:
    """What a user types for a command. A trailing underscore sets a name apart from Python's."""
    return command.__name__.rstrip("_")


def _call(command: Callable[..., int], group: str | None, values: dict[str, Any]) -> int:
    try:
        return command(**values)
    except CommandError as error:
        words = [group, word(command)] if group else [word(command)]
        print(f"{invocation(*words)}: {printable(str(error))}", file=sys.stderr)
        return 1


def _run_typer(typer: Any, words: list[str]) -> int:
    app = typer.Typer(
        help=ABOUT, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @app.callback(invoke_without_command=True)
    def about(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            print(__version__)
            raise typer.Exit()

    for command in COMMANDS:
        app.command(word(command))(_for_typer(typer, command))
    for group, (text, commands) in GROUPS.items():
        sub = typer.Typer(help=text, no_args_is_help=True)
        for command in commands:
            sub.command(word(command))(_for_typer(typer, command, group))
        app.add_typer(sub, name=group)
    try:
        app(args=words, prog_name=invocation())
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _for_typer(
    typer: Any, command: Callable[..., int], group: str | None = None
) -> Callable[..., None]:
    """The command with a signature that typer reads."""

    def run(**values: Any) -> None:
        raise typer.Exit(_call(command, group, values))

    described = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[kind, _typer_option(typer, option)],
        )
        for name, kind, default, option in parameters(command)
    ]  # fmt: skip
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(described)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in described}
    return run


def _typer_option(typer: Any, option: Option) -> Any:
    if option.positional:
        return typer.Argument(help=option.help, metavar=option.flag, show_default=False)
    return typer.Option(option.flag, help=option.help, metavar=option.metavar)


def _run_plain(words: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(invocation(), description=ABOUT, epilog=MORE)
    parser.add_argument("--version", action="version", version=__version__)
    choices = parser.add_subparsers(metavar="COMMAND", dest="command")
    for command in COMMANDS:
        _add_plain_command(choices, command)
    for group, (text, commands) in GROUPS.items():
        sub = choices.add_parser(group, help=text, description=text)
        of_group = sub.add_subparsers(metavar="COMMAND", required=True)
        for command in commands:
            _add_plain_command(of_group, command, group)
    if not words or (words[1:] == [] and words[0] in GROUPS):
        (choices.choices[words[0]] if words else parser).print_help()
        return 2
    if not words[0].startswith("-") and words[0] not in choices.choices:
        print(
            f"{invocation()}: no command {words[0]!r} among {', '.join(choices.choices)}; {MORE}",
            file=sys.stderr,
        )
        return 2
    try:
        values = vars(parser.parse_args(words))
    except SystemExit as end:
        return int(end.code or 0)
    values.pop("command")
    return _call(values.pop("function"), values.pop("group"), values)


def _add_plain_command(choices: Any, command: Callable[..., int], group: str | None = None) -> None:
    text = inspect.getdoc(command)
    sub = choices.add_parser(word(command), help=text.split("\n")[0], description=text)
    sub.set_defaults(function=command, group=group)
    for parameter in parameters(command):
        _add_plain(sub, parameter)


def _add_plain(parser: Any, parameter: Parameter) -> None:
    """The parameter for argparse, by the type that its values have."""
    name, kind, default, option = parameter
    listed = get_origin(kind) is list
    if option.positional:
        required = default is inspect.Parameter.empty
        count = "*" if listed else None if required else "?"
        how = {} if required else {"default": default}
        parser.add_argument(name, metavar=option.flag, nargs=count, help=option.help, **how)
    elif kind is bool:
        parser.add_argument(option.flag, dest=name, action="store_true", help=option.help)
    elif listed:
        parser.add_argument(
            option.flag, dest=name, action="append", default=list(default), help=option.help,
            metavar=option.metavar,
        )  # fmt: skip
    else:
        value = next((one for one in get_args(kind) or (kind,) if one in (int, float)), str)
        parser.add_argument(
            option.flag, dest=name, type=value, default=default, help=option.help,
            metavar=option.metavar,
        )  # fmt: skip
