"""`/v1/states` and `/v1/adapters`: tuned states and adapters that requests may name in `state` and `adapter`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, Field

from routes.context import Context
from routes.request.bodies import Body, Fields, MixedState
from routes.request.decode_defaults import Defaults, as_defaults
from routes.request.model_names import TUNED_PREFIX, adapter_names, state_names
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.loaded_models import AdapterEntry, AdapterList, TunedStateEntry, TunedStateList
from routes.route import Handler, Route, Upload
from rwkv_batch.calls import (
    AdapterInfo,
    AddAdapter,
    AddState,
    ListAdapters,
    ListStates,
    RemoveAdapter,
    RemoveState,
    StateInfo,
)
from rwkv_batch.errors import ErrorKind
from rwkv_batch.models_folder import relative_to_folder

_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)


class NameQuery(Fields):
    """The resource to remove."""

    name: str = Field(min_length=1, description="Name of the resource.")


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A type of resource, with the models of its bodies and answers."""

    path: str
    title: str
    """For summaries: "tuned state"."""
    body: type[Body]
    entry: type[BaseModel]
    listing: type[BaseModel]
    not_found: ErrorKind
    example: dict[str, Any]
    takes_form: bool = False


def make_routes(
    resource: ResourceType, list_handler: Handler, add_handler: Handler, remove_handler: Handler
) -> tuple[Route, ...]:
    """Return the routes: GET and POST on its path, DELETE on `path/{name}`. POST and DELETE need an administrator."""
    return (
        Route(
            "GET",
            resource.path,
            list_handler,
            None,
            f"List every {resource.title}.",
            answer=resource.listing,
            errors=_ENGINE_ERRORS,
            waits_for_engine=True,
        ),
        Route(
            "POST",
            resource.path,
            add_handler,
            resource.body,
            f"Load a {resource.title}.",
            answer=resource.entry,
            errors=(ErrorKind.NAME_TAKEN, ErrorKind.OVERLOADED, *_ENGINE_ERRORS),
            example=resource.example,
            takes_form=resource.takes_form,
            is_admin=True,
            waits_for_engine=True,
        ),
        Route(
            "DELETE",
            f"{resource.path}/{{name}}",
            remove_handler,
            None,
            f"Remove a {resource.title}.",
            query=NameQuery,
            answer=resource.entry,
            errors=(resource.not_found, *_ENGINE_ERRORS),
            example={"name": resource.example["name"]},
            is_admin=True,
            waits_for_engine=True,
        ),
    )


STATES_PATH = "/v1/states"


class StateBody(Body):
    """A state to load."""

    name: str = Field(
        min_length=1, max_length=64, description="The state's name in requests: letters, digits, '.', '_' and '-'."
    )
    file: str = Field("", max_length=4096, description="Path of a .pth or .safetensors file within --models-dir.")
    content: bytes = Field(b"", description="The file itself, in a form (multipart/form-data).")
    states: Annotated[list[MixedState], Field(max_length=16)] = Field(
        [], description="Members and weights of a mixture, instead of a file."
    )
    orientation: Literal["auto", "value_key", "key_value"] = Field(
        "auto",
        description="Orientation of the file's matrices: value_key as in RWKV-PEFT, key_value (transposed) "
        "as in converted files. auto detects it. A wrong value gives worse answers and no error.",
    )
    defaults: Defaults | None = Field(
        None, description="Decode parameters for requests that name the state and give none."
    )


def _state_entry(context: Context, info: StateInfo) -> dict[str, Any]:
    entry = {**msgspec.structs.asdict(info), "models": state_names(context.config.model_name, info.name)}
    entry["defaults"] = info.defaults.given
    return entry | {"mixture": [{"name": name, "weight": weight} for name, weight in info.mixture]}


Info = TypeVar("Info", StateInfo, AdapterInfo)


def _visible(infos: list[Info]) -> list[Info]:
    """Return the entries that a key may see.

    Only owners may use fine-tuned models.
    """
    return [info for info in infos if not (current_request().owner and info.name.startswith(TUNED_PREFIX))]


async def list_states(context: Context, query: dict[str, str]) -> HandlerResponse:
    """List the tuned states, oldest first."""
    infos = _visible(await call_engine(context, ListStates()))
    return json_response({"object": "list", "data": [_state_entry(context, info) for info in infos]})


async def add_state(context: Context, body: StateBody) -> HandlerResponse:
    """Load a tuned state. Requests may name it after this answer."""
    mixture = tuple((member.name, member.weight) for member in body.states)
    defaults = as_defaults(body.defaults, context.config)
    call = AddState(body.name, body.file, body.content, mixture, body.orientation, defaults)
    return json_response(_state_entry(context, await call_engine(context, call)))


async def remove_state(context: Context, upload: Upload) -> HandlerResponse:
    """Remove a tuned state. Admitted rows and existing sessions keep it."""
    return json_response(_state_entry(context, await call_engine(context, RemoveState(upload.query.name))))


TUNED_STATES = ResourceType(
    STATES_PATH,
    "tuned state",
    StateBody,
    TunedStateEntry,
    TunedStateList,
    ErrorKind.STATE_NOT_FOUND,
    {"name": "pirate", "file": "states/pirate.pth"},
    takes_form=True,
)


ADAPTERS_PATH = "/v1/adapters"


class AdapterBody(Body):
    """An adapter to load."""

    name: str = Field(
        min_length=1, max_length=64, description="The adapter's name in requests: letters, digits, '.', '_' and '-'."
    )
    file: str = Field(
        min_length=1,
        max_length=4096,
        description="Path within --models-dir: a LoRA, PiSSA or two-dimensional MiSS file, or a PEFT folder.",
    )
    scale: float | None = Field(
        None, ge=-1000, le=1000, description="Factor of the matrix pairs. Required if the file has none."
    )


def _adapter_entry(context: Context, info: AdapterInfo) -> dict[str, Any]:
    folder = context.config.models_dir
    paths = {"file": relative_to_folder(folder, info.file), "error": relative_to_folder(folder, info.error)}
    return {**msgspec.structs.asdict(info), **paths, "models": adapter_names(context.config.model_name, info.name)}


async def list_adapters(context: Context, query: dict[str, str]) -> HandlerResponse:
    """List the adapters, oldest first."""
    infos = _visible(await call_engine(context, ListAdapters()))
    return json_response({"object": "list", "data": [_adapter_entry(context, info) for info in infos]})


async def add_adapter(context: Context, body: AdapterBody) -> HandlerResponse:
    """Load an adapter. Requests may name it after this answer."""
    return json_response(
        _adapter_entry(context, await call_engine(context, AddAdapter(body.name, body.file, body.scale)))
    )


async def remove_adapter(context: Context, upload: Upload) -> HandlerResponse:
    """Remove an adapter. Admitted rows keep it until they end. Its sessions cannot continue without it."""
    return json_response(_adapter_entry(context, await call_engine(context, RemoveAdapter(upload.query.name))))


ADAPTERS = ResourceType(
    ADAPTERS_PATH,
    "adapter",
    AdapterBody,
    AdapterEntry,
    AdapterList,
    ErrorKind.ADAPTER_NOT_FOUND,
    {"name": "french", "file": "adapters/french.safetensors", "scale": 1.0},
)
ROUTES = (
    *make_routes(TUNED_STATES, list_states, add_state, remove_state),
    *make_routes(ADAPTERS, list_adapters, add_adapter, remove_adapter),
)
