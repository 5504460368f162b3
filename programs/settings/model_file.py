"""Chooses the model files: the given ones, those that names or URLs mean, or the demo model."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from programs.settings.config import Settings
from programs.settings.generation_config import read_defaults
from programs.settings.model_source import DEMO, resolve
from rwkv_batch.errors import StartupError
from rwkv_batch.translation.prompt_forms import prompt_form

logger = logging.getLogger(__name__)


def with_default_model(settings: Settings) -> Settings:
    """Fills in the model's file, its default parameters and its form of prompts. Without a file: the demo model.

    Also fills in the draft model's file, if it is used. Names and URLs: see `model_source`. Raises StartupError if a
    file cannot be downloaded, read or written.
    """
    path = resolve(settings.engine.model_path or DEMO)
    try:
        if not Path(path).is_dir():  # the engine checks folders
            with open(path, "rb"):
                pass
    except OSError as error:
        raise StartupError(f"model file {path} cannot be read ({error.strerror}); check --model-path") from None
    http, engine = settings.http, settings.engine
    draft = resolve(engine.draft_model) if engine.uses_draft_model else engine.draft_model
    if draft and not engine.uses_draft_model:
        logger.warning("--draft-model has no effect with --speculate %s; add --speculate auto", engine.speculate)
    return msgspec.structs.replace(
        settings,
        engine=msgspec.structs.replace(engine, model_path=path, draft_model=draft),
        http=msgspec.structs.replace(
            http,
            defaults=msgspec.to_builtins(read_defaults(http.generation_config, path)),
            translation_prompt=prompt_form(http.translation_prompt, path),
        ),
    )
