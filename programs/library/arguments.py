"""Arguments of LLM as flags of the command.

Messages about flags become messages about arguments.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from programs.settings.flags import FLAGS, PASSWORD_FILE, REMOVED
from rwkv_batch.config import DTYPES, KERNELS, WKV_STATES

_RENAMED = {"model_path": "model"}
"""Field of a config struct -> parameter of LLM with another name."""


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


_ARGUMENTS = {option: _name(option) for option in (PASSWORD_FILE[0], *REMOVED)} | {
    option: _RENAMED.get(flag.field, flag.field)
    for flags in FLAGS.values()
    for flag in flags
    for option in flag.options
}
"""Flag -> argument in messages."""
_OPTIONS = {_name(option): option for option in _ARGUMENTS} | {name: option for option, name in _ARGUMENTS.items()}
"""Argument -> flag. The flag's own name is an argument too."""

_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)(?: ('[^']*'|(?!--)[^\s()']+?)(?=[.,;:)]*(?:\s|$)))?")
"""A flag, and the next word or quoted text."""
_VALUE_WORDS = {*DTYPES, *KERNELS, *WKV_STATES}
_HELP = re.compile(r"see (?:python app\.py|rwkv-batch)(?: [a-z]+)* --help")


def command_line_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the command line of keyword arguments. None means not given. Raises TypeError for an unknown name."""
    for name in given:
        if name not in _OPTIONS:
            nearest = difflib.get_close_matches(name, sorted(_OPTIONS), 1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "docs/settings.md has all of them"
            raise TypeError(f"LLM has no argument {name!r}; {remedy}")
    return [f"{_OPTIONS[name]}={_text(value)}" for name, value in given.items() if value is not None]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def library_message(message: str) -> str:
    """Returns an engine's message with arguments of LLM in place of flags. `--dtype int8` becomes `dtype="int8"`."""
    return _FLAG.sub(_as_argument, _HELP.sub("see docs/settings.md", message))


def _as_argument(found: re.Match[str]) -> str:
    option, value = found.groups()
    name = _ARGUMENTS.get(option)
    if name is None:
        return found[0]
    if value is None:
        return name
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return f"{name}={value}"
    if value in _VALUE_WORDS or re.search(r"[\d/=:']|^[A-Z]+$", value):
        return f'{name}="{value.strip(chr(39))}"'
    return f"{name} {value}"
