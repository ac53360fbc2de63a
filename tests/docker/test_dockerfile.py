"""What can be said of the overlay without building it. `make image-test` builds and runs it."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of every instruction, lines that continue joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, arguments) for name, arguments in lines]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, arguments in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, arguments))
    return found


def context_sources() -> list[str]:
    copies = [words.split() for name, words in instructions() if name == "COPY"]
    return [path for words in copies if "--from" not in words[0] for path in words[:-1]]


def test_every_stage_is_from_the_base_that_the_user_names():
    assert instructions()[0] == ("ARG", "BASE")
    assert [stage[0][1].split()[0] for stage in stages()] == ["${BASE}"] * 3


def test_the_image_is_the_base_and_one_layer():
    assert stages()[-1] == [("FROM", "${BASE}"), ("COPY", "--from=verified /overlay/ /")]


def test_the_user_of_the_base_verifies():
    names = [name for name, _ in stages()[1]]
    assert "USER" not in names
    assert stages()[1][-1] == ("RUN", '"${PYTHON}" -m expert_cache_shim doctor --build')


def test_what_is_copied_is_there_and_reaches_the_builder():
    kept = [
        line[1:] for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]  # fmt: skip
    assert context_sources()
    for source in context_sources():
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept), source
    assert all((ROOT / pattern).exists() for pattern in kept)


def test_nothing_is_fetched():
    names = {name for name, _ in instructions()}
    assert names <= {"ARG", "FROM", "USER", "COPY", "RUN"}
    runs = " ".join(words for name, words in instructions() if name == "RUN")
    assert not re.search(r"\b(curl|wget|git|apt|apt-get|dnf|pip|uv)\b", runs)


def test_compose_names_the_dockerfile_and_flags_that_offload():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert services.keys() == {"nvidia", "amd"}
    for service in services.values():
        context = (COMPOSE.parent / service["build"]["context"]).resolve()
        assert context / service["build"]["dockerfile"] == DOCKERFILE
        assert service["build"]["args"].keys() == {"BASE"}
        assert service["entrypoint"] == ["vllm", "serve"]
        assert "--cpu-offload-params=experts" in service["command"]
        assert any(word.startswith("--cpu-offload-gb=") for word in service["command"])


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say():
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
