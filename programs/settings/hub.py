"""Models on Hugging Face's hub: `hf:OWNER/NAME/FILE` or `hf:OWNER/NAME`, downloaded into the hub's cache.

HF_ENDPOINT names a mirror, HF_TOKEN a token, HF_HOME the cache's folder, HF_HUB_OFFLINE=1 uses the cache alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.models_folder import shard_names

logger = logging.getLogger(__name__)

PREFIX = "hf:"
_ENDPOINT = "https://huggingface.co"
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"hf:(?P<repository>{_PART}/{_PART})(?:/(?P<file>[\w][\w./-]{{0,255}}))?")
_MODELS = (".pth", ".gguf", ".st")
_FOLDER = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
_SHOWN = 8


@contextlib.contextmanager
def reported_download(name: str, remedy: str) -> Iterator[None]:
    """Turn what prevents a download into a StartupError."""
    try:
        from huggingface_hub.errors import HTTPError
    except ImportError:
        raise StartupError(f"{name} needs huggingface_hub; pip install huggingface_hub; {remedy}") from None
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no reason given'}"
        raise StartupError(f"{name} cannot be downloaded ({reason}); {remedy}") from error


def download(name: str) -> str:
    """Return the path of a model on the hub. Downloads it if needed. Raises StartupError."""
    found = _NAME.fullmatch(name)
    if found is None or ".." in name:
        raise StartupError(f"{name!r} is not hf:OWNER/NAME or hf:OWNER/NAME/FILE; check --model-path")
    repository, file = found["repository"], found["file"]
    source: dict[str, Any] = {"repo_id": repository, "endpoint": os.environ.get("HF_ENDPOINT")}
    link = f"{_ENDPOINT}/{repository}"
    remedy = f"try again, or download the file from {link} on another machine and give its path as --model-path"
    with reported_download(name, remedy):
        import huggingface_hub

        if file is None:
            # list_repo_files would try for half a minute without a network
            siblings = huggingface_hub.HfApi(source["endpoint"]).model_info(repository).siblings or []
            file = _only_model(name, [one.rfilename for one in siblings])
        if file is None:
            path = huggingface_hub.snapshot_download(**source, allow_patterns=list(_FOLDER))
        else:
            logger.info("%s: downloading %s unless it is in the hub's cache", name, file)
            paths = [huggingface_hub.hf_hub_download(**source, filename=one) for one in shard_names(file)]
            path = paths[0]
    stored = Path(path).resolve()
    logger.info("%s is %s%s", name, path, f", SHA-256 {stored.name}" if len(stored.name) == 64 else "")
    return str(path)


def _only_model(name: str, files: list[str]) -> str | None:
    """Return the repository's model file; None: its safetensors files are a folder. Raises StartupError."""
    models = [file for file in files if file.endswith(_MODELS)]
    if "model.safetensors" in files or "model.safetensors.index.json" in files:
        return None
    if len(models) == 1:
        return models[0]
    raise StartupError(f"{name} has {len(models)} models ({first_names(models) or 'none'}); give one as {name}/FILE")


def first_names(names: Sequence[str]) -> str:
    """Return the first names in a text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
