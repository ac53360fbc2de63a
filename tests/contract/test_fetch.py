"""Sources out of wheels, from an index on this machine, and out of folders."""

from __future__ import annotations

import hashlib
import io
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zipfile import ZIP_STORED, ZipFile

import pytest

from tools.vllm_contract import sources
from tools.vllm_contract.fetch import GAP
from tools.vllm_contract.sources import SourcesError, fetched, listed, unpacked

FILES = {
    "vllm/_version.py": "__version__ = version = '0.34.0'\n",
    "vllm/config/model.py": "class ModelConfig: ...\n",
    "vllm/entrypoints/llm.py": "not read\n",
    "vllm/v1/worker/gpu_worker.py": "class Worker: ...\n",
}
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}
BINARY = b"".join(hashlib.sha256(str(n).encode()).digest() for n in range(2**15))
READ = {name for name in FILES if "entrypoints" not in name}


def wheel() -> bytes:
    """With a megabyte between the files, as compiled code lies between them."""
    content = io.BytesIO()
    with ZipFile(content, "w", ZIP_STORED) as archive:
        for number, (name, text) in enumerate(FILES.items()):
            archive.writestr(name, text)
            archive.writestr(f"vllm/_C{number}.so", BINARY)
        for name, text in METADATA.items():
            archive.writestr(f"vllm-0.34.0.dist-info/{name}", text)
    return content.getvalue()


class Index:
    """A package index on a port of this machine, and what was transferred from it."""

    def __init__(self, versions: list[str], ranges: bool) -> None:
        self.transferred = 0
        self.wheel = wheel()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.startswith("/simple/vllm"):
                    names = (f"vllm-{version}-py3-none-any.whl" for version in versions)
                    page = "".join(f'<a href="/files/{name}">{name}</a>' for name in names)
                    self.answer(page.encode(), kind="text/html")
                elif self.path.startswith("/files/"):
                    self.answer(index.wheel, ranges=ranges)
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def answer(self, body: bytes, kind: str = "application/zip", ranges=False) -> None:
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
                if ranges and wanted:
                    body = body[int(wanted[1]) : int(wanted[2]) + 1]
                self.send_response(206 if ranges and wanted else 200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if ranges:
                    self.send_header("Accept-Ranges", "bytes")
                self.end_headers()
                if self.command == "GET":
                    index.transferred += len(body)
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve(monkeypatch):
    """Starts an index, and makes it the one that pip is set up for."""
    pytest.importorskip("pip", reason="pip finds the index")
    started = []

    def start(*versions: str, ranges: bool = True) -> Index:
        index = Index(list(versions), ranges)
        started.append(index)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server.server_port}/simple")
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        return index

    yield start
    for index in started:
        index.server.shutdown()
        index.server.server_close()


def names_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def test_releases_are_those_of_the_index_in_order(serve):
    serve("0.100.0", "0.34.0", "0.9.2", "0.21.0", "0.35.0rc1")
    assert listed() == ["0.21.0", "0.34.0", "0.100.0"]


def test_only_the_files_that_are_read_are_transferred(serve, tmp_path):
    index = serve("0.34.0")
    folder = fetched("0.34.0", tmp_path)
    assert names_in(folder) == READ
    for name in READ:
        assert (folder / name).read_text() == FILES[name]
    assert index.transferred < len(index.wheel) / 4
    assert GAP < len(BINARY)  # or the binaries would have been read with the files


def test_every_file_is_transferred_when_asked_for(serve, tmp_path):
    serve("0.34.0")
    assert names_in(fetched("0.34.0", tmp_path)) == READ
    assert names_in(fetched("0.34.0", tmp_path, everything=True)) == set(FILES)


@pytest.mark.parametrize("everything", [False, True])
def test_what_was_transferred_is_not_transferred_again(serve, tmp_path, everything):
    index = serve("0.34.0")
    fetched("0.34.0", tmp_path, everything=True)
    before = index.transferred
    fetched("0.34.0", tmp_path, everything)
    assert index.transferred == before


def test_another_selection_is_transferred_anew(serve, tmp_path):
    index = serve("0.34.0")
    folder = fetched("0.34.0", tmp_path)
    (folder / ".complete").write_text("vllm/config/")
    before = index.transferred
    fetched("0.34.0", tmp_path)
    assert index.transferred > before


def test_an_index_that_serves_no_parts_is_refused_with_the_remedy(serve, tmp_path):
    index = serve("0.34.0", ranges=False)
    with pytest.raises(SourcesError, match="--whole-wheels"):
        fetched("0.34.0", tmp_path)
    assert index.transferred < len(index.wheel)


def test_a_whole_wheel_is_transferred_when_asked_for(serve, tmp_path):
    serve("0.34.0", ranges=False)
    assert names_in(fetched("0.34.0", tmp_path, whole_wheels=True)) == READ


def test_a_release_that_the_index_has_not_is_named(serve, tmp_path):
    serve("0.34.0")
    with pytest.raises(SourcesError, match=r"no wheel of vllm 0\.35\.0"):
        fetched("0.35.0", tmp_path)


def test_an_index_without_vllm_is_named(serve):
    serve()
    with pytest.raises(SourcesError, match="no wheel of vLLM"):
        listed()


# --- Folders --------------------------------------------------------------------------------


def lay(folder, version: str) -> None:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")


def test_a_folder_of_unpacked_wheels_is_read_in_the_order_of_releases(tmp_path):
    for name, version in (("a", "0.100.0"), ("b", "0.33.0+cpu"), ("c", "0.34.0")):
        lay(tmp_path / name, version)
    (tmp_path / "d").mkdir()
    assert list(unpacked(tmp_path)) == ["0.33.0", "0.34.0", "0.100.0"]
    assert unpacked(tmp_path)["0.33.0"] == tmp_path / "b"


def test_an_environment_is_read_as_it_is(tmp_path):
    lay(tmp_path, "0.33.0")
    assert unpacked(tmp_path) == {"0.33.0": tmp_path}


def test_a_folder_without_vllm_is_named(tmp_path):
    with pytest.raises(SourcesError, match="holds no unpacked wheel"):
        unpacked(tmp_path)


def test_the_cache_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.default_cache() == tmp_path / "expert-cache-shim" / "vllm-sources"
