"""Turns keyword arguments into settings. Every flag of the command is an argument."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from native.temporary_folder import TemporaryFolder
from programs.library.engine_thread import EngineThread
from programs.library.errors import LLMError
from programs.settings import SettingsError, parse_settings
from programs.settings.model_file import with_default_model
from rwkv_batch.errors import StartupError

_FLAGS = {"model": "--model-path", "devices": "--pp-devices", "layers": "--pp-layers"}
"""Arguments whose flag has another name."""


def command_line_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the command line of keyword arguments. None means not given."""
    line = []
    for name, value in given.items():
        if value is not None:
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            line += [flag, _text(value)]
    return line


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def start_engine(given: Mapping[str, Any]) -> EngineThread:
    """Starts an engine. Arguments win over RWKV_... variables, which win over defaults.

    Without `state_db`, sessions live as long as the engine. Raises ValueError or LLMError.
    """
    folder = None
    if given.get("state_db") is None:
        folder = TemporaryFolder("library")
        given = {**given, "state_db": f"{folder.path}/sessions.db", "durability": given.get("durability") or "lazy"}
    try:
        settings = with_default_model(parse_settings(command_line_of(given), os.environ))
        engine = EngineThread(settings, folder)
        folder = None  # the engine owns it
        return engine
    except SettingsError as error:
        raise ValueError(str(error)) from None
    except StartupError as error:
        raise LLMError(str(error)) from None
    finally:
        if folder is not None:
            folder.remove()
