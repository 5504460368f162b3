"""`/v1/states`: the tuned states that requests may name in `state`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from routes.context import Context
from routes.request.bodies import Body, Defaults, MixedState, as_defaults
from routes.request.jobs import state_names
from routes.resource_routes import ResourceType, make_routes
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import TunedStateEntry, TunedStateList
from routes.route import Upload
from rwkv_batch.calls import AddState, ListStates, RemoveState, StateInfo
from rwkv_batch.errors import ErrorKind

PATH = "/v1/states"


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


def _to_json(context: Context, info: StateInfo) -> dict[str, Any]:
    entry = {**msgspec.structs.asdict(info), "models": state_names(context.config.model_name, info.name)}
    entry["defaults"] = info.defaults.given
    return entry | {"mixture": [{"name": name, "weight": weight} for name, weight in info.mixture]}


async def list_states(context: Context, query: dict[str, str]) -> HandlerResponse:
    """List the tuned states, oldest first."""
    infos = await call_engine(context, ListStates())
    return json_response({"object": "list", "data": [_to_json(context, info) for info in infos]})


async def add_state(context: Context, body: StateBody) -> HandlerResponse:
    """Load a tuned state. Requests may name it after this answer."""
    mixture = tuple((member.name, member.weight) for member in body.states)
    defaults = as_defaults(body.defaults, context.config)
    call = AddState(body.name, body.file, body.content, mixture, body.orientation, defaults)
    return json_response(_to_json(context, await call_engine(context, call)))


async def remove_state(context: Context, upload: Upload) -> HandlerResponse:
    """Remove a tuned state. Admitted rows and existing sessions keep it."""
    return json_response(_to_json(context, await call_engine(context, RemoveState(upload.query.name))))


RESOURCE = ResourceType(
    PATH,
    "tuned state",
    StateBody,
    TunedStateEntry,
    TunedStateList,
    ErrorKind.STATE_NOT_FOUND,
    {"name": "pirate", "file": "states/pirate.pth"},
    takes_form=True,
)
ROUTES = make_routes(RESOURCE, list_states, add_state, remove_state)
