"""Chooses the model file: the given one, one that a name or URL means, or the demo model."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from native.files import VARIABLE, cache_folder
from programs.settings.config import Settings
from programs.settings.generation_config import read_defaults
from programs.settings.model_source import resolve
from rwkv_batch.errors import StartupError
from rwkv_batch.translation.prompt_forms import prompt_form

logger = logging.getLogger(__name__)


def with_default_model(settings: Settings) -> Settings:
    """Fills in the model's file, its default parameters and its form of prompts. Without a file: the demo model.

    Names and URLs: see `model_source`. Raises StartupError if the file cannot be downloaded, read or written.
    """
    path = resolve(settings.engine.model_path)
    if not path:
        try:
            path = str(_demo_model())
        except OSError as error:
            raise StartupError(
                f"the demo model cannot be written to {cache_folder()} ({error.strerror}); "
                f"give --model-path, or another folder as {VARIABLE}"
            ) from None
    try:
        if not Path(path).is_dir():  # the engine checks folders
            with open(path, "rb"):
                pass
    except OSError as error:
        raise StartupError(f"model file {path} cannot be read ({error.strerror}); check --model-path") from None
    http = settings.http
    return msgspec.structs.replace(
        settings,
        engine=msgspec.structs.replace(settings.engine, model_path=path),
        http=msgspec.structs.replace(
            http,
            defaults=msgspec.to_builtins(read_defaults(http.generation_config, path)),
            translation_prompt=prompt_form(http.translation_prompt, path),
        ),
    )


def _demo_model() -> Path:
    """Returns the demo model's file. If the demo is not installed, returns random weights."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        from demo.files import ensure_model

        path = Path(ensure_model())
        logger.info("no --model-path given: serving the built-in demo model %s", path)
        return path
    path = cache_folder() / "random.pth"
    if not path.exists():
        from demo.random_weights import write_random_model

        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f"half-{os.getpid()}.pth")
        write_random_model(half, layers=4, width=256)
        half.replace(path)
    logger.warning("no --model-path and no demo model: serving random weights (%s), whose text is meaningless", path)
    return path
