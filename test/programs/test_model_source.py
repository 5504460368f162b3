"""`--model-path` with a URL of a local server and with `ollama:NAME`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from programs.settings.model_source import resolve
from rwkv_batch.errors import StartupError
from rwkv_batch.model.files.gguf_writer import Entry, write_gguf
from rwkv_batch.model.tensor_files import read_tensors

pytest.importorskip("huggingface_hub")
MODEL = bytes(range(256)) * 500
SHA256 = hashlib.sha256(MODEL).hexdigest()


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sent: list[tuple[str, str]] = []
        """path and Range of each GET"""
        self.etag = '"1"'
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self.server.sent.append((self.path, self.headers.get("Range", "")))
        self._answer(MODEL)

    def _answer(self, body: bytes) -> None:
        first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        if self.path == "/none.pth":
            self.send_error(404)
            return
        self.send_response(206 if first else 200)
        self.send_header("ETag", self.server.etag)
        if self.path != "/sizeless.pth" and not (body and self.path == "/endless.pth"):
            self.send_header("Content-Length", str(len(MODEL) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(MODEL) - 1}/{len(MODEL)}")
        self.end_headers()
        self.wfile.write(body[first:] * (3 if self.path == "/endless.pth" else 1))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    monkeypatch.setenv("RWKV_BUILD_DIR", str(tmp_path / "cache"))
    running = _Server()
    yield running
    running.shutdown()
    running.server_close()


def test_a_url_is_downloaded_once(server: _Server) -> None:
    url = f"{server.url}/a/m.pth?key=1#sha256={SHA256}"
    path = resolve(url)
    assert Path(path).read_bytes() == MODEL and Path(path).name == "m.pth"
    assert [one.name for one in Path(path).parent.iterdir()] == ["m.pth"]
    server.shutdown()
    assert resolve(url) == path and server.sent == [("/a/m.pth?key=1", "")]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_download_goes_on_unless_the_file_has_changed(server: _Server, is_same: bool) -> None:
    url = f"{server.url}/m.pth"
    path = Path(resolve(url))
    path.rename(path.with_name("m.pth.part"))
    path.with_name("m.pth.part").write_bytes(MODEL[:1000])
    path.with_name("m.pth.tag").write_text(f"{server.etag} {len(MODEL)}")
    if not is_same:
        server.etag = '"2"'
    assert Path(resolve(url)).read_bytes() == MODEL
    assert server.sent[1:] == [("/m.pth", "bytes=1000-" if is_same else "")]


def test_a_split_model_is_downloaded_whole(server: _Server) -> None:
    path = Path(resolve(f"{server.url}/m-00002-of-00002.gguf"))
    assert path.name == "m-00001-of-00002.gguf" and path.with_name("m-00002-of-00002.gguf").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/none.pth", "cannot be downloaded .*404.*; try again, or give the path of a file"),
        ("/sizeless.pth", "the server names a size of 0 bytes"),
        ("/endless.pth", f"the server sends more than the {len(MODEL)} bytes that it named"),
        (f"/m.pth#sha256={'0' * 64}", f"its SHA-256 is {SHA256}, not 0000"),
        ("/m.pth#md5=1", "must end in .pth, .safetensors, .gguf, .st, or then #sha256="),
        ("/page.html", "must end in .pth"),
        (f"/m-00001-of-00002.gguf#sha256={SHA256}", "is one of 2 files; leave #sha256= out"),
    ],
)
def test_what_cannot_be_downloaded_is_said(server: _Server, place: str, message: str) -> None:
    for _ in range(2):  # nothing wrong is kept for the next start
        with pytest.raises(StartupError, match=message):
            resolve(server.url + place)


def test_addresses_without_encryption_are_refused() -> None:
    with pytest.raises(StartupError, match="is not encrypted; give a URL that begins with https://"):
        resolve("http://models.example/m.pth")


class Store:
    """A folder like ollama's, with one model."""

    def __init__(self, folder: Path, place: str = "registry.ollama.ai/library/rwkv7/latest") -> None:
        file = BytesIO()
        write_gguf(
            file,
            {"general.architecture": "rwkv7"},
            [Entry("token_embd.weight", "float32", (4, 8), lambda: [b"\0\0\x80?" * 32])],
        )
        self.digest = hashlib.sha256(file.getvalue()).hexdigest()
        self.manifest = folder / "manifests" / place
        self.blob = folder / "blobs" / f"sha256-{self.digest}"
        for path in (self.manifest, self.blob):
            path.parent.mkdir(parents=True)
        self.blob.write_bytes(file.getvalue())
        self.write(len(file.getvalue()))

    def write(self, size: Any, kind: str = "model") -> None:
        layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{self.digest}", "size": size}
        other = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:1", "size": 1}
        self.manifest.write_text(json.dumps({"layers": [other, layer]}))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("RWKV_BUILD_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return Store(tmp_path / "models")


def test_a_model_of_ollamas_store_is_read_in_place(store: Store) -> None:
    for name in ("rwkv7", "rwkv7:latest", "library/rwkv7", "rwkv7"):
        path = Path(resolve(f"ollama:{name}"))
        assert path.resolve() == store.blob and path.suffix == ".gguf"
    assert [tuple(tensor.shape) for tensor in read_tensors(path).values()] == [(4, 8)]


def test_names_with_owner_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_BUILD_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    store = Store(tmp_path, "hf.co/me/rwkv7-gguf/Q8_0")
    assert Path(resolve("ollama:hf.co/me/rwkv7-gguf:Q8_0")).resolve() == store.blob
    with pytest.raises(StartupError, match=r"ollama:other is not in .* \(hf.co/me/rwkv7-gguf:Q8_0\); give the folder"):
        resolve("ollama:other")


def test_what_is_wrong_in_ollamas_store_is_said(store: Store) -> None:
    for name in ("", "..", "a:b:c", "../../rwkv7", "a/b/c/d"):
        with pytest.raises(StartupError, match="is not ollama:NAME"):
            resolve(f"ollama:{name}")
    size = store.blob.stat().st_size
    store.write(size + 1)
    with pytest.raises(StartupError, match=rf"has {size} bytes, its manifest says {size + 1}; run: ollama pull"):
        resolve("ollama:rwkv7")
    store.write(size, kind="adapter")
    with pytest.raises(StartupError, match="names no model file"):
        resolve("ollama:rwkv7")
    store.manifest.write_text('{"layers": 1}')
    with pytest.raises(StartupError, match="is no manifest of ollama"):
        resolve("ollama:rwkv7")
    store.write(size)
    store.blob.unlink()
    with pytest.raises(StartupError, match=r"cannot be read \(No such file or directory\); run: ollama pull"):
        resolve("ollama:rwkv7")
