"""Models that --model-path names without a path: `demo`, `hf:OWNER/NAME`, `ollama:NAME` and `https://…`.

`ollama:NAME` is a file of ollama's store on this machine; nothing is downloaded. A URL's file goes to the cache folder,
and the next start reads it there. Its end may be `#sha256=HEX`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from native.files import VARIABLE, cache_folder
from programs.settings.hub import PREFIX as HUB_PREFIX
from programs.settings.hub import download as download_from_hub
from programs.settings.hub import first_names, reported_download
from rwkv_batch.errors import StartupError
from rwkv_batch.models_folder import shard_names

logger = logging.getLogger(__name__)

DEMO = "demo"
OLLAMA_PREFIX = "ollama:"
_OLLAMA_STORES = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama/models")
_REGISTRY = "registry.ollama.ai"
_PART = r"[\w][\w.-]{0,79}"
_OLLAMA_NAME = re.compile(rf"(?:(?:(?P<host>{_PART})/)?(?P<owner>{_PART})/)?(?P<name>{_PART})(?::(?P<tag>{_PART}))?")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFEST_BYTES = 1 << 20
_SUFFIXES = (".pth", ".safetensors", ".gguf", ".st")
_FRAGMENT = re.compile(r"sha256=([0-9a-f]{64})")
_MAX_BYTES = 1 << 40


def resolve(path: str) -> str:
    """Return the path of a model. Downloads it if `path` names one elsewhere. Raises StartupError."""
    if path == DEMO:
        try:
            return str(_demo_model())
        except OSError as error:
            raise StartupError(
                f"the demo model cannot be written to {cache_folder()} ({error.strerror}); "
                f"give --model-path, or another folder as {VARIABLE}"
            ) from None
    if path.startswith(HUB_PREFIX):
        return download_from_hub(path)
    if path.startswith(OLLAMA_PREFIX):
        return find_in_ollama(path.removeprefix(OLLAMA_PREFIX))
    if path.startswith(("https://", "http://")):
        return download(path)
    return path


def _demo_model() -> Path:
    """Return the demo model's file. If the demo is not installed, return random weights."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        from demo.files import ensure_model

        path = Path(ensure_model())
        logger.info("the model is the built-in demo model %s", path)
        return path
    path = cache_folder() / "random.pth"
    if not path.exists():
        from demo.random_weights import write_random_model

        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"half-{os.getpid()}.pth")
        write_random_model(half, layers=4, width=256)
        half.replace(path)
    logger.warning("the demo model is not installed: these are random weights (%s), whose text is meaningless", path)
    return path


def find_in_ollama(name: str) -> str:
    """Return a link to the file of a model in ollama's store. Raises StartupError."""
    found = _OLLAMA_NAME.fullmatch(name)
    if found is None:
        raise StartupError(f"{OLLAMA_PREFIX}{name} is not ollama:NAME, ollama:NAME:TAG or ollama:OWNER/NAME:TAG")
    parts = (found["host"] or _REGISTRY, found["owner"] or "library", found["name"], found["tag"] or "latest")
    stores = [Path(one).expanduser() for one in filter(None, (os.environ.get("OLLAMA_MODELS"), *_OLLAMA_STORES))]
    for store in stores:
        manifest = store.joinpath("manifests", *parts)
        if manifest.is_file():
            break
    else:
        names = sorted(filter(None, (one for store in stores for one in _ollama_names(store))))
        shown = first_names(names)
        where = "give the folder as OLLAMA_MODELS, or run: ollama pull"
        raise StartupError(f"ollama:{name} is not in ollama's store on this machine ({shown or 'no models'}); {where}")
    blob, size = _model_blob(manifest)
    file = store / "blobs" / blob
    try:
        actual = file.stat().st_size
    except OSError as error:
        raise StartupError(f"ollama:{name}: {file} cannot be read ({error.strerror}); run: ollama pull") from None
    if actual != size:
        raise StartupError(f"ollama:{name}: {file} has {actual} bytes, its manifest says {size}; run: ollama pull")
    link = cache_folder() / "ollama" / f"{'-'.join(parts[1:])}.gguf"
    half = link.with_name(f".{link.name}-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        half.symlink_to(file)
        half.replace(link)
    except OSError as error:
        raise StartupError(f"{link} cannot be written ({error.strerror}); give {file} a name with .gguf") from None
    logger.info("ollama:%s is %s, SHA-256 %s", name, file, blob.removeprefix("sha256-"))
    return str(link)


def _ollama_names(store: Path) -> Iterator[str]:
    for path in sorted((store / "manifests").glob("*/*/*/*"))[:1000]:
        host, owner, name, tag = path.parts[-4:]
        place = "" if owner == "library" else f"{owner}/" if host == _REGISTRY else f"{host}/{owner}/"
        yield f"{place}{name}:{tag}"


def _model_blob(manifest: Path) -> tuple[str, int]:
    """Return name and size of the model's blob. Raises StartupError."""
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(_MAX_MANIFEST_BYTES))["layers"]
        for layer in layers:
            if layer["mediaType"] == _OLLAMA_MODEL and (digest := _DIGEST.fullmatch(layer["digest"])):
                return f"sha256-{digest[1]}", int(layer["size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{manifest} is no manifest of ollama ({error}); run: ollama pull") from None
    raise StartupError(f"{manifest} names no model file; run: ollama pull")


def download(url: str) -> str:
    """Return the path of a URL's file in the cache folder. Downloads it once, and goes on where it stopped.

    The files of a split model are downloaded together. Raises StartupError.
    """
    address, _, fragment = url.partition("#")
    parsed = urlsplit(address)
    name = unquote(parsed.path).rpartition("/")[2]
    checksum = _FRAGMENT.fullmatch(fragment.lower())
    if parsed.scheme == "http" and parsed.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise StartupError(f"{address} is not encrypted; give a URL that begins with https://")
    if not name.endswith(_SUFFIXES) or "\0" in name or (fragment and checksum is None):
        raise StartupError(f"{url} must end in {', '.join(_SUFFIXES)}, or then #sha256= and 64 hexadecimal digits")
    names = shard_names(name)
    if checksum is not None and len(names) > 1:
        raise StartupError(f"{url} is one of {len(names)} files; leave #sha256= out")
    base = parsed.path.rpartition("/")[0]
    folder = cache_folder() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    with reported_download(url, "try again, or give the path of a file"):
        folder.mkdir(parents=True, exist_ok=True)
        for one in names:
            source = address if len(names) == 1 else parsed._replace(path=f"{base}/{one}").geturl()
            _download(source, folder / one, checksum and checksum[1])
    return str(folder / names[0])


class _BoundedFile(FileIO):
    """A file that refuses to grow above a size."""

    limit = 0

    def write(self, data: Any) -> int:
        if os.fstat(self.fileno()).st_size + len(data) > self.limit:
            raise OSError(f"the server sends more than the {self.limit} bytes that it named")
        return super().write(data)


def _download(url: str, path: Path, checksum: str | None) -> None:
    if path.exists():
        return
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import get_session

    half, tag = path.with_name(path.name + ".part"), path.with_name(path.name + ".tag")
    with _BoundedFile(half, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # another process has downloaded it meanwhile
            return
        head = get_session().head(url, follow_redirects=True)
        head.raise_for_status()
        size, etag = int(head.headers.get("Content-Length", 0)), head.headers.get("ETag", "")
        if not 0 < size <= _MAX_BYTES:
            raise OSError(f"the server names a size of {size} bytes")
        known = f"{etag} {size}"
        if not etag or not tag.exists() or tag.read_text("utf-8") != known:
            file.truncate(0)
            tag.write_text(known, "utf-8")
        done = file.seek(0, os.SEEK_END)
        free = shutil.disk_usage(path.parent).free
        if size - done > free:
            raise OSError(f"it has {size} bytes, {path.parent} has room for {free}; name another folder as {VARIABLE}")
        logger.info("downloading %s: %d of %d bytes are there", url, done, size)
        file.limit = size
        http_get(url, file, resume_size=done, expected_size=size)
        file.seek(0)
        actual = hashlib.file_digest(file, "sha256").hexdigest()
        if checksum is not None and actual != checksum:
            file.truncate(0)
            raise OSError(f"its SHA-256 is {actual}, not {checksum}")
        half.replace(path)
    with contextlib.suppress(OSError):
        tag.unlink()
    logger.info("%s is %s, SHA-256 %s", url, path, actual)
