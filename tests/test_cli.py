"""The command line itself: the same with typer and without, and no part of the shim."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest
from start_up import ROOT, make_venv

from expert_cache_shim import __version__, cli
from expert_cache_shim.commands import Option

COMMANDS = {(cli.word(command),): command for command in cli.COMMANDS} | {
    (group, cli.word(command)): command
    for group, (_, commands) in cli.GROUPS.items()
    for command in commands
}
every_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(params=["typer", "argparse"])
def front(request, capsys, monkeypatch):
    """Runs `expert-cache` through one of the two parsers."""
    if request.param == "argparse":
        monkeypatch.setitem(sys.modules, "typer", None)
    else:
        pytest.importorskip("typer")

    def run(*words):
        return Done(cli.main(words), *capsys.readouterr())

    return run


def test_without_a_command_it_lists_them(front):
    done = front()
    assert done.status == 2
    assert all(words[0] in done.out for words in COMMANDS)


@pytest.mark.parametrize("group", cli.GROUPS)
def test_a_group_without_a_command_lists_them(front, group):
    done = front(group)
    assert done.status == 2
    assert all(words[1] in done.out + done.err for words in COMMANDS if words[0] == group)


@every_command
def test_every_option_of_a_command_is_offered(front, words):
    done = front(*words, "--help")
    assert done.status == 0
    for parameter in cli.parameters(COMMANDS[words]):
        assert parameter.option.flag in done.out


@every_command
def test_every_option_of_a_command_is_documented(words):
    page = "trace.md" if words[0] == "trace" else "command-line.md"
    text = (ROOT / "docs" / page).read_text()
    for parameter in cli.parameters(COMMANDS[words]):
        assert f"`{parameter.option.flag}" in text


def test_it_says_its_version(front):
    done = front("--version")
    assert (done.status, done.out) == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    "words", [["no-such-command"], ["build", "--no-such-option"], ["--no-such-option"]]
)
def test_what_it_does_not_know_is_status_2(front, words):
    done = front(*words)
    assert done.status == 2 and "no-such" in done.err


def test_values_reach_the_command(front):
    done = front("build", "--arch", "gfx942", "--arch", "sm_90", "--with", "nvcc")
    assert done.status == 1
    assert "--arch gfx942, --arch sm_90, --with nvcc: one library is for" in done.err
    done = front("build", "--arch", "host", "--output", "/no/such/folder/x.so")
    assert done.status == 1 and "/no/such/folder: no such folder" in done.err


def test_a_command_that_is_not_there_without_the_extra_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main(["serve"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'serve'" in said and "pip install 'expert-cache-shim[tools]'" in said


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_a_bare_python_is_enough(version, tmp_path):
    python = make_venv(version, tmp_path / "venv", "--without-pip")
    outcome = python.run("-m", "expert_cache_shim", "--version", cwd=ROOT)
    assert (outcome.status, outcome.out, outcome.err) == (0, f"{__version__}\n", "")


def test_the_shim_imports_no_part_of_the_command_line():
    code = (
        "import sys, expert_cache_shim.hooks, expert_cache_shim.native\n"
        "print([m for m in sys.modules if m.startswith(('typer', 'rich', 'expert_cache_shim.c'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def show(
    model: Annotated[str, Option("MODEL", "A word without a dash.")],
    words: Annotated[list[str], Option("WORDS", "Any number of them.")] = (),
    count: Annotated[int | None, Option("--count", "A whole number.")] = None,
    share: Annotated[float, Option("--share", "A number.")] = 0.5,
    loud: Annotated[bool, Option("--loud", "A flag.")] = False,
) -> int:
    """Prints what it was given."""
    print(repr((model, list(words), count, share, loud)))
    return 0


@pytest.mark.parametrize(
    "words, given",
    [
        (["m"], ("m", [], None, 0.5, False)),
        (["--count", "3", "m", "--loud"], ("m", [], 3, 0.5, True)),
        (["--share", "1", "m", "--", "x", "--count"], ("m", ["x", "--count"], None, 1.0, False)),
    ],
)
def test_words_without_a_dash_and_numbers_reach_the_command(front, monkeypatch, words, given):
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, show))
    done = front("show", *words)
    assert (done.status, done.out, done.err) == (0, f"{given!r}\n", "")


@pytest.mark.parametrize("words", [[], ["m", "--count", "few"], ["m", "--share", "half"]])
def test_a_missing_word_or_a_wrong_number_is_status_2(front, monkeypatch, words):
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, show))
    done = front("show", *words)
    assert done.status == 2 and done.out == "" and done.err
