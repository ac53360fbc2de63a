"""The command `expert-cache`.

A command is a plain function in `commands`: it takes options as parameters, prints, and returns
the exit status. Its signature is the one description of its options. Where typer is installed (the
extra `tools`) it reads them; where it is not, in an image without network, argparse does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from . import __version__
from .commands import CommandError, Option, invocation
from .commands.build import build
from .commands.doctor import doctor
from .commands.start_up import disable, enable

COMMANDS: tuple[Callable[..., int], ...] = (build, enable, disable, doctor)
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


def _call(command: Callable[..., int], values: dict[str, Any]) -> int:
    try:
        return command(**values)
    except CommandError as error:
        print(f"{invocation(command.__name__)}: {error}", file=sys.stderr)
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
        app.command(command.__name__)(_for_typer(typer, command))
    try:
        app(args=words, prog_name=invocation())
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _for_typer(typer: Any, command: Callable[..., int]) -> Callable[..., None]:
    """The command with a signature that typer reads."""

    def run(**values: Any) -> None:
        raise typer.Exit(_call(command, values))

    described = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[
                kind, typer.Option(option.flag, help=option.help, metavar=option.metavar)
            ],
        )
        for name, kind, default, option in parameters(command)
    ]  # fmt: skip
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(described)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in described}
    return run


def _run_plain(words: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(invocation(), description=ABOUT, epilog=MORE)
    parser.add_argument("--version", action="version", version=__version__)
    choices = parser.add_subparsers(metavar="COMMAND", dest="command")
    for command in COMMANDS:
        text = inspect.getdoc(command)
        sub = choices.add_parser(command.__name__, help=text.split("\n")[0], description=text)
        sub.set_defaults(function=command)
        for name, kind, default, option in parameters(command):
            how: dict[str, Any] = {"metavar": option.metavar}
            if kind is bool:
                how = {"action": "store_true"}
            elif get_origin(kind) is list:
                how["action"], default = "append", list(default)
            sub.add_argument(option.flag, dest=name, default=default, help=option.help, **how)
    if not words:
        parser.print_help()
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
    return _call(values.pop("function"), values)
