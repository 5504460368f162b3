"""`/v1/states` and `/v1/adapters`: tuned states and adapters that requests may name in `state` and `adapter`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import Field

from native.files import FOLDER_MODE, write_private
from routes.context import Context
from routes.file_store import Store
from routes.fine_tuning.store import JobStore
from routes.openai.files import call_store, get_store, new_id
from routes.request.bodies import Body, Fields, MixedState
from routes.request.decode_defaults import Defaults, as_defaults
from routes.request.model_names import TUNED_PREFIX, adapter_names, parse_model_id, state_names
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.loaded_models import AdapterEntry, AdapterList, TunedStateEntry, TunedStateList
from routes.route import Routes
from rwkv_batch import calls
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.models_folder import relative_to_folder

STATES_PATH, ADAPTERS_PATH = "/v1/states", "/v1/adapters"
ROUTES = Routes(errors=(ErrorKind.ENGINE_LOST, ErrorKind.DRAINING), waits_for_engine=True)
_LOADS = (ErrorKind.NAME_TAKEN, ErrorKind.OVERLOADED)
_PUBLISHED = "published-"
"""First part of the names of uploaded adapters and of copies of jobs' LoRAs."""
_COPY_UNWRITABLE, _COPY_STAYS = "the adapter's file cannot be written", "the adapter's file cannot be removed"


class NameQuery(Fields):
    """The resource to remove."""

    name: str = Field(min_length=1, description="Name of the resource.")


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


def _state_entry(context: Context, info: calls.StateInfo) -> dict[str, Any]:
    entry = {**msgspec.structs.asdict(info), "models": state_names(context.config.model_name, info.name)}
    entry["defaults"] = info.defaults.given
    return entry | {"mixture": [{"name": name, "weight": weight} for name, weight in info.mixture]}


Info = TypeVar("Info", calls.StateInfo, calls.AdapterInfo)


def _visible(infos: list[Info]) -> list[Info]:
    """Return the entries that a key may see. Only owners may use fine-tuned models."""
    return [info for info in infos if not (current_request().owner and info.name.startswith(TUNED_PREFIX))]


@ROUTES.add("GET", STATES_PATH, "List every tuned state.", answer=TunedStateList)
async def list_states(context: Context) -> HandlerResponse:
    """List the tuned states, oldest first."""
    infos = _visible(await call_engine(context, calls.ListStates()))
    return json_response({"object": "list", "data": [_state_entry(context, info) for info in infos]})


@ROUTES.add(
    "POST",
    STATES_PATH,
    "Load a tuned state.",
    answer=TunedStateEntry,
    errors=_LOADS,
    takes_form=True,
    is_admin=True,
    example={"name": "pirate", "file": "states/pirate.pth"},
)
async def add_state(context: Context, body: StateBody) -> HandlerResponse:
    """Load a tuned state. Requests may name it after this answer."""
    mixture = tuple((member.name, member.weight) for member in body.states)
    defaults = as_defaults(body.defaults, context.config)
    call = calls.AddState(body.name, body.file, body.content, mixture, body.orientation, defaults)
    return json_response(_state_entry(context, await call_engine(context, call)))


@ROUTES.add(
    "DELETE",
    f"{STATES_PATH}/{{name}}",
    "Remove a tuned state.",
    answer=TunedStateEntry,
    errors=(ErrorKind.STATE_NOT_FOUND,),
    is_admin=True,
    example={"name": "pirate"},
)
async def remove_state(context: Context, query: NameQuery) -> HandlerResponse:
    """Remove a tuned state. Admitted rows and existing sessions keep it."""
    return json_response(_state_entry(context, await call_engine(context, calls.RemoveState(query.name))))


class AdapterBody(Body):
    """An adapter to load."""

    name: str = Field(
        min_length=1, max_length=64, description="The adapter's name in requests: letters, digits, '.', '_' and '-'."
    )
    file: str = Field(
        "",
        max_length=4096,
        description="Path within --models-dir: a LoRA, PiSSA or two-dimensional MiSS file, or a PEFT folder.",
    )
    content: bytes = Field(b"", description="The file itself, in a form (multipart/form-data).")
    job: str = Field(
        "",
        max_length=80,
        description="Instead of a file: id of a fine-tuning job. Its LoRA then serves every key under this name.",
    )
    scale: float | None = Field(
        None,
        ge=-1000,
        le=1000,
        strict=False,  # a form has texts
        description="Factor of the matrix pairs. Required if the file has none.",
    )


def _adapter_entry(context: Context, info: calls.AdapterInfo) -> dict[str, Any]:
    folder = context.config.models_dir
    paths = {"file": relative_to_folder(folder, info.file), "error": relative_to_folder(folder, info.error)}
    return {**msgspec.structs.asdict(info), **paths, "models": adapter_names(context.config.model_name, info.name)}


@ROUTES.add("GET", ADAPTERS_PATH, "List every adapter.", answer=AdapterList)
async def list_adapters(context: Context) -> HandlerResponse:
    """List the adapters, oldest first."""
    infos = _visible(await call_engine(context, calls.ListAdapters()))
    return json_response({"object": "list", "data": [_adapter_entry(context, info) for info in infos]})


@ROUTES.add(
    "POST",
    ADAPTERS_PATH,
    "Load an adapter.",
    answer=AdapterEntry,
    errors=_LOADS,
    takes_form=True,
    is_admin=True,
    example={"name": "french", "file": "adapters/french.safetensors", "scale": 1.0},
)
async def add_adapter(context: Context, body: AdapterBody) -> HandlerResponse:
    """Load an adapter. Requests may name it after this answer."""
    if sum(map(bool, (body.file, body.job, body.content))) != 1:
        message = "must be a path within --models-dir, or absent with an uploaded file or the job of a LoRA"
        raise invalid("file", message, body.file or None)
    if body.file:
        info = await call_engine(context, calls.AddAdapter(body.name, body.file, body.scale))
    elif body.job:
        info = await _publish(context, body)
    else:
        suffix = ".safetensors" if body.content[8:9] == b"{" else ".pth"
        copy = get_store(context).adapter_path(new_id(_PUBLISHED)).with_suffix(suffix)
        await call_store(copy.parent.mkdir, _COPY_UNWRITABLE, FOLDER_MODE, True, True)
        await call_store(write_private, _COPY_UNWRITABLE, copy, body.content)
        try:
            info = await _load_copy(context, calls.AddAdapter(body.name, str(copy), body.scale, is_own=True))
        except ServiceError as error:
            if error.info.field != "file":
                raise
            reason = error.info.message.removeprefix("file: ").replace(f"adapter file {copy}", str(copy))
            raise invalid("content", reason.replace(str(copy), "the uploaded file"), None) from None
    return json_response(_adapter_entry(context, info))


async def _publish(context: Context, body: AdapterBody) -> calls.AdapterInfo:
    """Load a copy of a job's LoRA, which outlives the job's own model. Raises ServiceError."""
    store, owner = get_store(context), current_request().owner
    job = await call_store(JobStore(store).job, "the fine-tuning jobs cannot be read", owner, body.job)
    model = job.fine_tuned_model if job is not None and not job.is_deleted else None
    tuned = parse_model_id(model or "")
    if tuned is None or not tuned.has_adapter:
        message = "must be a succeeded fine-tuning job with a LoRA; GET /openai/v1/fine_tuning/jobs lists the jobs"
        raise invalid("job", message, body.job)
    copy = store.adapter_path(new_id(_PUBLISHED))
    await call_store(shutil.copyfile, _COPY_UNWRITABLE, store.adapter_path(tuned.name), copy)
    scale = 1.0 if body.scale is None else body.scale
    return await _load_copy(context, calls.AddAdapter(body.name, str(copy), scale, is_own=True))


async def _load_copy(context: Context, call: calls.AddAdapter) -> calls.AdapterInfo:
    """Load a file of the store, which is removed on failure. Raises ServiceError."""
    try:
        return await call_engine(context, call)
    except ServiceError:
        await call_store(_forget, _COPY_STAYS, get_store(context), call.file)
        raise


def _forget(store: Store, file: str) -> None:
    """Remove an uploaded adapter or the copy of a published LoRA. Other files stay."""
    path = Path(file)
    if path.name.startswith(_PUBLISHED) and path.with_suffix(".pth") == store.adapter_path(path.stem):
        path.unlink(missing_ok=True)


@ROUTES.add(
    "DELETE",
    f"{ADAPTERS_PATH}/{{name}}",
    "Remove an adapter.",
    answer=AdapterEntry,
    errors=(ErrorKind.ADAPTER_NOT_FOUND,),
    is_admin=True,
    example={"name": "french"},
)
async def remove_adapter(context: Context, query: NameQuery) -> HandlerResponse:
    """Remove an adapter. Admitted rows keep it until they end. Its sessions cannot continue without it."""
    info = await call_engine(context, calls.RemoveAdapter(query.name))
    if context.files is not None:
        await call_store(_forget, _COPY_STAYS, context.files, info.file)
    return json_response(_adapter_entry(context, info))
