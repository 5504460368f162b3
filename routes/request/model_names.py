"""What a request's `model` says beside the model: `<model>:<state>`, or `<model> <state>` as older clients write it."""

from __future__ import annotations

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from rwkv_batch.errors import ErrorKind, ServiceError

SEPARATORS = (":", " ")


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
    return served if asked == served or asked.startswith(tuple(served + one for one in SEPARATORS)) else None


def _in_model(asked: str, served: str) -> str:
    return asked[len(served) + 1 :] if asked != served and base_name(asked, served) is not None else ""
