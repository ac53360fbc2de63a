"""The documents say what the source says, and speak of nothing that is not there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from documents import ROOT, Document, documents, text_files
from message_shapes import ANY, all_modules, fits, module
from settings_table import COLUMNS, table
from synthetic.snapshots import described

from expert_cache_shim import policy
from expert_cache_shim.settings import VARIABLES
from expert_cache_shim.telemetry import SnapshotFile

DOCUMENTS = documents()
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)


def page(name: str) -> Document:
    return Document(ROOT / name)


# --- Links, paths, commands -----------------------------------------------------------------


@every_document
def test_links_lead_to_files_and_headings_that_are_there(document):
    for link in document.links:
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (document.path.parent / parts.path).resolve() if parts.path else document.path
        assert target.exists(), link
        assert not parts.fragment or parts.fragment in Document(target).anchors, link


FOLDERS = r"\.ci|bench|docker|docs|examples|expert_cache_shim|hip|tests|tools"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]+")
BUILT = {f"expert_cache_shim/lib/libexpertcache_{backend}.so" for backend in ("host", "cuda")}


@every_document
def test_files_and_folders_that_are_named_are_there(document):
    named = {path.rstrip("./") for path in PATH.findall(document.text)}
    assert [path for path in named - BUILT if not (ROOT / path).exists()] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))


@every_document
def test_make_targets_that_are_named_are_there(document):
    named = {name for code in document.code for name in re.findall(r"\bmake ([a-z-]+)", code)}
    assert named <= make_targets()


def test_the_readme_names_the_targets_that_a_stranger_needs():
    code = "\n".join(page("README.md").code)
    for target in ("demo", "test", "test-fast", "cuda"):
        assert re.search(rf"\bmake {target}\b(?!-)", code), target


@every_document
def test_modules_that_python_is_to_run_are_there(document):
    for name in re.findall(r"\bpython[\d.]* -m ([\w.]+)", document.text):
        assert importlib.util.find_spec(name), name


@every_document
def test_variables_that_are_named_are_read_somewhere(document):
    known = {variable.name for variable in VARIABLES}
    known |= set(re.findall(r"EXPERT_CACHE_[A-Z]+", (ROOT / "hip" / "build.sh").read_text()))
    misspelt = {"EXPERT_CACHE_SLOT"}  # the example of such a name
    assert set(re.findall(r"EXPERT_CACHE_[A-Z_]*[A-Z]", document.text)) - misspelt <= known


# --- What is in the source as well ----------------------------------------------------------


@pytest.mark.parametrize("name", COLUMNS)
def test_the_table_of_settings_is_that_of_the_source(name):
    assert f"<!-- settings -->\n{table(COLUMNS[name])}\n" in page(name).text, (
        "run `python -m tests.settings_table`"
    )


def test_limits_are_those_of_the_kernels():
    for name in ("README.md", "docs/kernels.md", "docs/troubleshooting.md"):
        assert f"{policy.MAX_IDS:,}" in page(name).text, name
    assert f"2 to {policy.MAX_EXPERTS} experts" in page("README.md").text


def test_the_counters_that_are_explained_are_those_that_are_kept():
    rows = page("docs/troubleshooting.md").rows
    start = rows.index(["counter", "meaning", "if it is high"]) + 2
    names = []
    for row in rows[start:]:
        found = re.findall(r"`(\w+)`", row[0])
        if not found:
            break
        names += found
    assert tuple(names[: len(policy.COUNTERS)]) == policy.COUNTERS


# --- What the shim says ---------------------------------------------------------------------


def refusals() -> set[tuple[str, str]]:
    return {
        (reason, remedy)
        for name in ("arming", "refusals")
        for reason, remedy in module(name).calls("Refusal")
    }


@pytest.mark.parametrize("reason, remedy", sorted(refusals()))
def test_a_refusal_is_documented_with_its_remedy(reason, remedy):
    document = page("docs/refusals.md")
    if reason == ANY:  # the text of another error, which the next test looks for
        assert f"`{remedy}`" in document.text
    else:
        assert [f"`{reason}`", f"`{remedy}`"] in [row[:2] for row in document.rows]


def errors() -> set[str]:
    native, settings, discovery = map(module, ("native", "settings", "discovery"))
    rebuild = native.returned("_rebuild")
    found = [text.replace(rebuild, ANY) for (text,) in native.calls("LibraryError")]
    found += [text for (text,) in settings.calls("SettingsError")]
    found += [text for (text,) in discovery.calls("NotExpertMajor")]
    return set(found)


@pytest.mark.parametrize("text", sorted(errors()))
def test_an_error_that_becomes_a_reason_is_documented(text):
    assert text in page("docs/refusals.md").code


def quoted_lines() -> list[str]:
    """Lines of the log in the documents."""
    blocks = [block for found in DOCUMENTS for block in found.blocks("text")]
    return [line for block in blocks for line in block.splitlines()]


def logged() -> set[str]:
    levels = ("info", "warning", "error", "exception")
    return {
        arguments[0]
        for source in all_modules()
        for level in levels
        for arguments in source.calls(f"logger.{level}")
    } - {f"expert cache: {ANY}"}


@pytest.mark.parametrize("shape", sorted(logged()))
def test_a_line_that_the_shim_can_log_is_documented(shape):
    assert any(fits(shape, line) for line in quoted_lines())


@pytest.mark.parametrize("text", sorted(t for (t,) in module("storage").calls("StorageError")))
def test_a_reason_for_plain_storage_is_documented(text):
    assert any(fits(f"{ANY}{text}", line) for line in quoted_lines())


@pytest.mark.parametrize("line", quoted_lines())
def test_a_line_that_is_quoted_is_one_that_the_shim_can_log(line):
    assert line.startswith("expert cache: ")
    # A shape with few words of its own would fit anything.
    shapes = {s for source in all_modules() for s in source.strings() if len(s.split()) > 5}
    told = line.removeprefix("expert cache: ")
    assert any(fits(shape.removeprefix("expert cache: "), told) for shape in shapes)


# --- Examples run ---------------------------------------------------------------------------


@pytest.fixture
def run_example(tmp_path):
    """Runs a command as a user would who has the shim on PYTHONPATH and counters to read."""
    layer = described("layer", record_bytes=2**30)
    writer = SnapshotFile(tmp_path / "counters", "a-model", 0, [layer])
    writer.mirror(0)[:3] = 4, 3, 1  # steps, hits, misses
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "EXPERT_CACHE_SNAPSHOT": str(tmp_path / "counters"),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_the_command_that_shows_the_counters_does(run_example):
    (command,) = [
        text for block in page("README.md").blocks("") for text in block.splitlines()
        if text.startswith("expert-cache status --once")
    ]  # fmt: skip
    said = run_example("python", "-m", "expert_cache_shim", *command.split()[1:])
    assert "a-model" in said
    assert "75.0%" in said and "1.0 GiB" in said


def test_the_command_that_looks_for_the_shim_finds_it(run_example):
    blocks = page("docs/troubleshooting.md").blocks("")
    (command,) = [block for block in blocks if block.startswith("python -c")]
    assert run_example("sh", "-c", command) == "True\n"


def test_the_commands_that_install_by_hand_name_files_that_are_there():
    blocks = page("docs/install.md").blocks("")
    (block,) = [block for block in blocks if "cp -r" in block]
    copied = re.search(r'cp -r (.+) "\$site"', block).group(1).split()
    assert set(copied) == {"expert_cache_shim", "expert_cache_shim.pth"}
    assert all((ROOT / name).exists() for name in copied)


@every_document
def test_every_example_in_python_is_one_that_a_test_runs(document):
    assert document.blocks("python") == []


# --- The project speaks of itself alone -----------------------------------------------------

HOSTS = {"download.pytorch.org", "github.com", "www.apache.org", "127.0.0.1"}
# In any text file. The brackets keep the patterns from finding themselves.
FOREIGN = {
    "an issue number": re.compile(r"(?<![\w&\"'])#[0-9]+\b|\b[iI]ssue [0-9]"),
    "a folder of one machine": re.compile(r"/[w]ork/|(?<![\w/])[s]hared/\w|/[h]ome/\w|/[r]oot/"),
}
FOREIGN_IN_DOCUMENTS = {
    "a word of how it was made": re.compile(r"\b([Ss]ession|[Hh]elper)s?\b"),
}


def urls(text: str) -> set[str]:
    return {urlsplit(url).hostname for url in re.findall(r"https?://[\w.:-]+", text)}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    try:
        return text_files()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no clone: git cannot list its files")


def matches(pattern: re.Pattern, texts: dict[str, str]) -> dict[str, str]:
    return {name: match[0] for name, text in texts.items() if (match := pattern.search(text))}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_has(what, files):
    assert matches(FOREIGN[what], files) == {}


@pytest.mark.parametrize("what", FOREIGN_IN_DOCUMENTS)
def test_no_document_has(what, files):
    texts = {name: text for name, text in files.items() if name.endswith(".md")}
    assert {"README.md", "docs/kernels.md"} < texts.keys()
    assert matches(FOREIGN_IN_DOCUMENTS[what], texts) == {}


def test_no_file_names_a_host_but_those_that_are_public_and_meant(files):
    found = {name: urls(text) - HOSTS for name, text in files.items()}
    assert {name: hosts for name, hosts in found.items() if hosts} == {}


@pytest.mark.parametrize(
    "what, text",
    [
        ("an issue number", "fixed in " + "#" + "12"),
        ("an issue number", "see issue " + "12"),
        ("a folder of one machine", "in /" + "work/main"),
        ("a folder of one machine", "see s" + "hared/design.md"),
        ("a word of how it was made", "by a " + "helper"),
    ],
)
def test_control_what_must_not_be_there_would_be_found(what, text):
    assert {**FOREIGN, **FOREIGN_IN_DOCUMENTS}[what].search(text)


def test_control_another_host_would_be_found():
    assert urls("pip install -i http" + "s://mirror.example/simple torch") == {"mirror.example"}
