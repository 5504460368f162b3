"""What a request's `model` says beside the model: `<model>:<state>`, or `<model> <state>` as older clients write it;
`<model>+<adapter>`, and both as `<model>+<adapter>:<state>`."""

from __future__ import annotations

import re

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from rwkv_batch.errors import ErrorKind, ServiceError

STATE_SEPARATORS = (":", " ")
ADAPTER_SEPARATOR = "+"
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")


def sanitize_name(name: str) -> str:
    """A name as it can be had here, character by character: RWKV-Infer's names may have spaces and all else."""
    return _INVALID_CHARACTER.sub("-", name)


def state_names(model: str, state: str) -> list[str]:
    """The names under which a tuned state is listed among the models."""
    return [f"{model}{separator}{state}" for separator in STATE_SEPARATORS]


def adapter_names(model: str, adapter: str) -> list[str]:
    """The names under which an adapter is listed among the models."""
    return [f"{model}{ADAPTER_SEPARATOR}{adapter}"]


def requested_adapter(body: ModelFields, config: HttpConfig) -> str:
    """The adapter that a body names, "" for none. Raises ServiceError if it names two."""
    named, _ = _parse_model_name(body.model, config.model_name)
    if body.adapter and named and body.adapter != named:
        message = f"adapter: model {body.model!r} names {named!r}, adapter another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="adapter", given=body.adapter)
    return body.adapter or named


def requested_state(body: ModelFields, config: HttpConfig) -> str:
    """The tuned state that a body names, "" for none. Raises ServiceError if it names two."""
    _, named = _parse_model_name(body.model, config.model_name)
    if body.state and named and body.state != named:
        message = f"state: model {body.model!r} names the tuned state {named!r}, state another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="state", given=body.state)
    return body.state or named


def base_name(requested: str, served: str) -> str | None:
    """`served` if a request names that model, alone or with an adapter or a tuned state; else None."""
    name, suffix = requested[: len(served)], requested[len(served) :]
    return (
        served
        if served in (name, sanitize_name(name)) and (not suffix or suffix[0] in (*STATE_SEPARATORS, ADAPTER_SEPARATOR))
        else None
    )


def _parse_model_name(requested: str, served: str) -> tuple[str, str]:
    """(adapter, tuned state) that a model's name has behind the model; "" for what it has not."""
    suffix = requested[len(served) :] if base_name(requested, served) is not None else ""
    adapter = ""
    if suffix.startswith(ADAPTER_SEPARATOR):
        adapter = re.split("[: ]", suffix[1:], maxsplit=1)[0]
        suffix = suffix[1 + len(adapter) :]
    return adapter, sanitize_name(suffix[1:])
