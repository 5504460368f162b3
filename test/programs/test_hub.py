"""`--model-path hf:OWNER/NAME/FILE`, from a small hub on this machine and without one."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from programs.settings.hub import download
from rwkv_batch.errors import StartupError

pytest.importorskip("huggingface_hub")
FILES = {
    "small.pth": b"first" * 100,
    "m-00001-of-00002.gguf": b"GGUF 1",
    "m-00002-of-00002.gguf": b"GGUF 2",
    "README.md": b"about",
}
COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    files = FILES

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/"):
            content = self._listing(path)
        else:
            owner_and_name, _, file = path.partition("/resolve/main/")
            found = self.files.get(file) if owner_and_name == "/me/models" else None
            if found is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = found
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _listing(self, path: str) -> bytes:
        entries = [{"type": "file", "path": name, "size": len(data), "oid": "b"} for name, data in self.files.items()]
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps(
            entries if "/tree/" in path else {"id": "me/models", "sha": COMMIT, "siblings": siblings}
        ).encode()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()


def test_a_named_file_is_downloaded_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO):
        path = download("hf:me/models/small.pth")
    assert Path(path).name == "small.pth" and Path(path).read_bytes() == FILES["small.pth"]
    assert f"SHA-256 {hashlib.sha256(FILES['small.pth']).hexdigest()}" in caplog.text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert download("hf:me/models/small.pth") == path, "without the hub, from the cache"


def test_a_split_model_is_downloaded_whole() -> None:
    path = Path(download("hf:me/models/m-00002-of-00002.gguf"))
    assert [file.name for file in sorted(path.parent.iterdir())] == list(FILES)[1:3]


def test_a_repository_of_one_model_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"has 3 models \(small\.pth, .*\); give one as hf:me/models/FILE"):
        download("hf:me/models")
    monkeypatch.setattr(_Hub, "files", {name: FILES[name] for name in ("small.pth", "README.md")})
    assert Path(download("hf:me/models")).name == "small.pth"


def test_what_cannot_be_downloaded_says_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "; try again, or .* the file from https://huggingface.co/me/models on another machine .* --model-path"
    with pytest.raises(StartupError, match=f"hf:me/models/none.pth cannot be downloaded .*{remedy}"):
        download("hf:me/models/none.pth")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for half a minute
    for name in ("hf:me/models/other.pth", "hf:me/models"):
        with pytest.raises(StartupError, match=f"{name} cannot be downloaded .*{remedy}") as caught:
            download(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:", "hf:me", "hf:../models/x.pth", "hf:me/models/../../x.pth", "hf:me//x.pth"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="is not hf:OWNER/NAME or hf:OWNER/NAME/FILE; check --model-path"):
        download(name)
