"""What a request's `model` says beside the model: `<model>:<state>`, or `<model> <state>` as older clients write it."""

from __future__ import annotations

import re

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from rwkv_batch.errors import ErrorKind, ServiceError

SEPARATORS = (":", " ")
_OTHER = re.compile(r"[^A-Za-z0-9._-]")


def plain_name(name: str) -> str:
    """A name as it can be had here, character by character: RWKV-Infer's names may have spaces and all else."""
    return _OTHER.sub("-", name)


def state_names(model: str, state: str) -> list[str]:
    """The names under which a tuned state is listed among the models."""
    return [f"{model}{separator}{state}" for separator in SEPARATORS]


def asked_state(body: ModelFields, config: HttpConfig) -> str:
    """The tuned state that a body names, "" for none. Raises ServiceError if it names two."""
    in_model = _in_model(body.model, config.model_name)
    if body.state and in_model and body.state != in_model:
        message = f"state: model {body.model!r} names the tuned state {in_model!r}, state another one; give one of them"
        raise ServiceError(ErrorKind.INVALID_FIELD, message, field="state", given=body.state)
    return body.state or in_model


def base_name(asked: str, served: str) -> str | None:
    """`served` if a request names that model, alone or with a tuned state; else None."""
    name, rest = asked[: len(served)], asked[len(served) :]
    return served if served in (name, plain_name(name)) and (not rest or rest[0] in SEPARATORS) else None


def _in_model(asked: str, served: str) -> str:
    return plain_name(asked[len(served) + 1 :]) if base_name(asked, served) is not None else ""
