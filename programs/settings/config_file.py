"""Reads a TOML file of settings: `port = 8000`, `warmup = true`, `cors-origin = ["https://a.example"]`."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from programs.settings.flags import FLAGS, PASSWORD_FILE
from programs.settings.values import SettingsError, file_error

CONFIG_FILE = ("--config", "RWKV_CONFIG")
"""Flag and variable of the file of settings."""
_MAX_BYTES = 1 << 20


def file_values(path: str) -> dict[str, str]:
    """Return variable -> text of the settings in a file. Raises SettingsError."""
    where = f"{CONFIG_FILE[0]} {path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise SettingsError(f"{where} has more than 1 MiB; give a file of settings")
        table = tomllib.loads(content.decode())
    except OSError as error:
        raise SettingsError(f"{CONFIG_FILE[0]}: {file_error(error)}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where} cannot be read as TOML: {error}") from None
    variables = {option.removeprefix("--"): name for option, name in options().items()}
    values = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in variables:
            nearest = difflib.get_close_matches(name, sorted(variables), 1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "rwkv-batch config lists all settings"
            raise SettingsError(f"{where} has a setting {key!r}, which does not exist; {remedy}")
        if variables[name] in values:
            raise SettingsError(f"{where} has the setting {name} twice, in two spellings; remove one")
        values[variables[name]] = _text(f"{where}: {key}", value)
    return values


def options() -> dict[str, str]:
    """Flag -> variable, with older names."""
    pairs = [
        pair for flags in FLAGS.values() for flag in flags for pair in zip(flag.options, flag.variables, strict=True)
    ]
    return dict([*pairs, PASSWORD_FILE])


def _text(name: str, value: object) -> str:
    """Return a value as a flag takes it. Raises SettingsError for tables and times."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ",".join(map(str, value))
    raise SettingsError(f"{name} must be a text, a number, true, false, or a list of these")
