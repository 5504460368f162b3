"""Names of models: `<model>:<state>`, `<model>+<adapter>` and `<model>+<adapter>:<state>`.

Older clients write a space instead of the colon. A name may end with Ollama's tag `:latest`. The name of a fine-tuned
model, `ft:BASE:ORG:SUFFIX:ID`, stands for a state, an adapter or both, which only its owner may use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from routes.config import HttpConfig
from routes.request.bodies import ModelFields
from routes.request.fields import error_value
from routes.request_context import current_request
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.ipc.served_model import DEFAULT_MODEL_NAME
from state_pool.errors import PRIVATE_PREFIX

STATE_SEPARATORS = (":", " ")
ADAPTER_SEPARATOR = "+"
LATEST = ":latest"
"""Ollama's tag of names without one. It names no state."""
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_FINE_TUNED = re.compile(r"ft:([^:]*):([^:]*):([^:]*):([slb][0-9a-z]+)(:latest)?")
TUNED_PREFIX = PRIVATE_PREFIX
"""Begins the names of states and adapters that jobs made."""


class TunedModel(msgspec.Struct, frozen=True):
    """What a name `ft:...` means."""

    base: str
    owner: str
    name: str
    """of its state and its adapter in the engine; depends on the owner too, so that another key cannot guess it"""
    has_state: bool
    has_adapter: bool


def parse_model_id(requested: str) -> TunedModel | None:
    """Return the parts of a fine-tuned model's name. None for another name."""
    found = _FINE_TUNED.fullmatch(requested)
    if found is None:
        return None
    digest = hashlib.blake2b(requested.removesuffix(":latest").encode(), digest_size=12).hexdigest()
    return TunedModel(found[1], found[2], f"{TUNED_PREFIX}{digest}", found[4][0] in "sb", found[4][0] in "lb")


def sanitize_name(name: str) -> str:
    """Replace characters that names here cannot have by "-". RWKV-Infer allows any character."""
    return _INVALID_CHARACTER.sub("-", name)


def state_names(model: str, state: str) -> list[str]:
    """Return the names of a tuned state in the list of models."""
    return [f"{model}{separator}{state}" for separator in STATE_SEPARATORS]


def adapter_names(model: str, adapter: str) -> list[str]:
    """Return the names of an adapter in the list of models."""
    return [f"{model}{ADAPTER_SEPARATOR}{adapter}"]


def _without_alias(requested: str) -> str:
    """Return the model's name with its tuned state and adapter. A tuned model's name `ft:...` stands for these."""
    tuned = parse_model_id(requested)
    if tuned is None:
        return requested
    adapter, state = ADAPTER_SEPARATOR if tuned.has_adapter else "", STATE_SEPARATORS[0] if tuned.has_state else ""
    return tuned.base + (adapter and adapter + tuned.name) + (state and state + tuned.name)


def _check_owner(requested: str, served: str) -> None:
    """Check that a tuned model is the key's own. Raises ServiceError."""
    tuned, owner = parse_model_id(requested), current_request().owner
    if tuned is not None and owner and sanitize_name(owner) != tuned.owner:
        raise model_not_found(requested, [served], "; GET /v1/models lists all names")


def check_tuned_name(name: str, requested: str, field: str) -> str:
    """Return a state's or adapter's name. Raises ServiceError if it is of a tuned model that `requested` does not name.

    Only the owner may use a tuned model, by its name `ft:...`.
    """
    tuned = parse_model_id(requested)
    if name.startswith(TUNED_PREFIX) and current_request().owner and (tuned is None or tuned.name != name):
        message = f"no {field} {name!r} is loaded; a fine-tuned model is named in the field model: ft:..."
        raise ServiceError(ErrorKind(f"{field}_not_found"), message, field=field, given=name)
    return name


def requested_adapter(body: ModelFields, config: HttpConfig) -> str:
    """Return the adapter that a body names, "" for none. Raises ServiceError if it names two."""
    return _requested(body, config, "adapter", "adapter")


def requested_state(body: ModelFields, config: HttpConfig) -> str:
    """Return the tuned state that a body names, "" for none. Raises ServiceError if it names two."""
    return _requested(body, config, "state", "tuned state")


def _requested(body: ModelFields, config: HttpConfig, field: Literal["adapter", "state"], what: str) -> str:
    _check_owner(body.model, config.model_name)
    named = _parse_model_name(body.model, config.model_name)[field == "state"]
    given = body.state if field == "state" else body.adapter
    if given and named and given != named:
        message = f"model {body.model!r} names {what} {named!r}, field {field} another one; give one of them"
        raise invalid(field, message, given)
    return check_tuned_name(given or named, body.model, field)


def requested_origin(body: ModelFields, config: HttpConfig) -> tuple[str, str]:
    """Return the tuned state and the adapter that a body names. Raises ServiceError if it names two of a kind."""
    return requested_state(body, config), requested_adapter(body, config)


def base_name(requested: str, served: str) -> str | None:
    """Return `served` if the request names that model, else None. The name may have an adapter or a state."""
    requested = _without_alias(requested)
    name, suffix = requested[: len(served)], requested[len(served) :]
    return (
        served
        if served in (name, sanitize_name(name)) and (not suffix or suffix[0] in (*STATE_SEPARATORS, ADAPTER_SEPARATOR))
        else None
    )


def means_model(requested: str, served: str) -> bool:
    """Return whether a name means the service's own model. That model has the name `served` and the default name."""
    return requested.removesuffix(LATEST) in ("", DEFAULT_MODEL_NAME) or base_name(requested, served) is not None


def means_bare_model(requested: str, served: str) -> bool:
    """Return whether a name means the service's own model, without an adapter or a state."""
    return means_model(requested, served) and not any(_parse_model_name(requested, served))


def model_not_found(requested: str, available: Iterable[str], remedy: str = "") -> ServiceError:
    """Return the error for a model that is not served. Ollama's programs search it for "not found"."""
    given, names = error_value(requested), ", ".join(map(repr, available)) or "none"
    message = f"model {given!r} not found; available: {names}{remedy}"
    return ServiceError(ErrorKind.MODEL_NOT_FOUND, message, field="model", given=given)


def _parse_model_name(requested: str, served: str) -> tuple[str, str]:
    """Return (adapter, tuned state) of a model name. A missing one is ""."""
    requested = _without_alias(requested.removesuffix(LATEST))
    suffix = requested[len(served) :] if base_name(requested, served) is not None else ""
    adapter = ""
    if suffix.startswith(ADAPTER_SEPARATOR):
        adapter = re.split("[: ]", suffix[1:], maxsplit=1)[0]
        suffix = suffix[1 + len(adapter) :]
    return adapter, sanitize_name(suffix[1:])
