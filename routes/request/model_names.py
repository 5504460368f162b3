"""Parses `model`: `<model>:<state>`, `<model>+<adapter>` and `<model>+<adapter>:<state>`.

Older clients write a space instead of the colon.
"""

from __future__ import annotations

import re

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from rwkv_batch.errors import ErrorKind, ServiceError

STATE_SEPARATORS = (":", " ")
ADAPTER_SEPARATOR = "+"
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")


def sanitize_name(name: str) -> str:
    """Replace characters that names here cannot have by "-". RWKV-Infer allows any character."""
    return _INVALID_CHARACTER.sub("-", name)


def state_names(model: str, state: str) -> list[str]:
    """Return the names of a tuned state in the list of models."""
    return [f"{model}{separator}{state}" for separator in STATE_SEPARATORS]


def adapter_names(model: str, adapter: str) -> list[str]:
    """Return the names of an adapter in the list of models."""
    return [f"{model}{ADAPTER_SEPARATOR}{adapter}"]


def requested_adapter(body: ModelFields, config: HttpConfig) -> str:
    """Return the adapter that a body names, "" for none. Raises ServiceError if it names two."""
    named, _ = _parse_model_name(body.model, config.model_name)
    if body.adapter and named and body.adapter != named:
        message = f"adapter: model {body.model!r} names adapter {named!r}, field adapter another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="adapter", given=body.adapter)
    return body.adapter or named


def requested_state(body: ModelFields, config: HttpConfig) -> str:
    """Return the tuned state that a body names, "" for none. Raises ServiceError if it names two."""
    _, named = _parse_model_name(body.model, config.model_name)
    if body.state and named and body.state != named:
        message = f"state: model {body.model!r} names tuned state {named!r}, field state another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="state", given=body.state)
    return body.state or named


def base_name(requested: str, served: str) -> str | None:
    """Return `served` if the request names that model, with or without adapter or state. Else None."""
    name, suffix = requested[: len(served)], requested[len(served) :]
    return (
        served
        if served in (name, sanitize_name(name)) and (not suffix or suffix[0] in (*STATE_SEPARATORS, ADAPTER_SEPARATOR))
        else None
    )


def _parse_model_name(requested: str, served: str) -> tuple[str, str]:
    """Return (adapter, tuned state) of a model name, "" for a missing one."""
    suffix = requested[len(served) :] if base_name(requested, served) is not None else ""
    adapter = ""
    if suffix.startswith(ADAPTER_SEPARATOR):
        adapter = re.split("[: ]", suffix[1:], maxsplit=1)[0]
        suffix = suffix[1 + len(adapter) :]
    return adapter, sanitize_name(suffix[1:])
