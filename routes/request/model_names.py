"""What a request's `model` says beside the model: `<model>:<state>`, or `<model> <state>` as older clients write it;
`<model>+<adapter>`, and both as `<model>+<adapter>:<state>`."""

from __future__ import annotations

import re

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from rwkv_batch.errors import ErrorKind, ServiceError

SEPARATORS = (":", " ")
OF_ADAPTER = "+"
_OTHER = re.compile(r"[^A-Za-z0-9._-]")


def plain_name(name: str) -> str:
    """A name as it can be had here, character by character: RWKV-Infer's names may have spaces and all else."""
    return _OTHER.sub("-", name)


def state_names(model: str, state: str) -> list[str]:
    """The names under which a tuned state is listed among the models."""
    return [f"{model}{separator}{state}" for separator in SEPARATORS]


def adapter_names(model: str, adapter: str) -> list[str]:
    """The names under which an adapter is listed among the models."""
    return [f"{model}{OF_ADAPTER}{adapter}"]


def asked_adapter(body: ModelFields, config: HttpConfig) -> str:
    """The adapter that a body names, "" for none. Raises ServiceError if it names two."""
    in_model, _ = _in_model(body.model, config.model_name)
    if body.adapter and in_model and body.adapter != in_model:
        message = f"adapter: model {body.model!r} names {in_model!r}, adapter another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="adapter", given=body.adapter)
    return body.adapter or in_model


def asked_state(body: ModelFields, config: HttpConfig) -> str:
    """The tuned state that a body names, "" for none. Raises ServiceError if it names two."""
    _, in_model = _in_model(body.model, config.model_name)
    if body.state and in_model and body.state != in_model:
        message = f"state: model {body.model!r} names the tuned state {in_model!r}, state another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="state", given=body.state)
    return body.state or in_model


def base_name(asked: str, served: str) -> str | None:
    """`served` if a request names that model, alone or with an adapter or a tuned state; else None."""
    name, rest = asked[: len(served)], asked[len(served) :]
    return served if served in (name, plain_name(name)) and (not rest or rest[0] in (*SEPARATORS, OF_ADAPTER)) else None


def _in_model(asked: str, served: str) -> tuple[str, str]:
    """(adapter, tuned state) that a model's name has behind the model; "" for what it has not."""
    rest = asked[len(served) :] if base_name(asked, served) is not None else ""
    adapter = ""
    if rest.startswith(OF_ADAPTER):
        adapter = re.split("[: ]", rest[1:], maxsplit=1)[0]
        rest = rest[1 + len(adapter) :]
    return adapter, plain_name(rest[1:])
