"""`/v1/models`: what is served, and loading and unloading more beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from routes.context import Context, Models
from routes.openai.errors import OPENAI_ERRORS
from routes.request.bodies import Body
from routes.request.decode_defaults import DefaultsFields, as_defaults
from routes.request.error_value import error_value
from routes.request.fields import Device, Fields, OneOf
from routes.request.model_names import adapter_names, state_names
from routes.response.event_stream import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import LoadedModel, Model, ModelList
from routes.route import Route, Upload
from rwkv_batch.calls import ListAdapters, ListStates
from rwkv_batch.config import DTYPES, KERNELS, WKV_STATES
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE
from rwkv_batch.ipc.served_model import MODEL_NAME, ModelSpec, ModelStatus, ServedModel
from rwkv_batch.models_folder import check_adapter_within, within

MODEL_SUFFIXES = (".pth", ".safetensors")
_SCALE = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


async def _model_entries(context: Context) -> list[dict[str, object]]:
    """A model, and it with each tuned state or adapter that can be used; without these while the engine is away."""
    name = context.config.model_name
    created = {name: context.started}
    try:
        states, adapters = await call_engine(context, ListStates()), await call_engine(context, ListAdapters())
    except ServiceError as error:
        if error.info.kind not in ENGINE_GONE:
            raise
        states, adapters = [], []
    for info in states:
        if not info.error:
            created |= dict.fromkeys(state_names(name, info.name), info.created)
    for adapter in adapters:
        if not adapter.error:
            created |= dict.fromkeys(adapter_names(name, adapter.name), adapter.created)
    return [{"id": name, "object": "model", "created": at, "owned_by": "rwkv"} for name, at in created.items()]


async def _entries_by_name(context: Context) -> dict[str, dict[str, object]]:
    """Everything that a request's `model` may be, by name, then what was to be loaded and is not ready."""
    entries = await _model_entries(context)
    for name in [model.spec.name for model in context.models.registered] if context.models is not None else ():
        entries += await _loaded_entries(context, name)
    return {str(entry["id"]): entry for entry in entries}


async def _loaded_entries(context: Context, name: str) -> list[dict[str, object]]:
    """The same of a model that was loaded while serving, as it is by now: others were asked for theirs meanwhile."""
    model = context.models.find(name) if context.models is not None else None
    if context.models is None or model is None:
        return []
    served = context.models.ready_context(model)
    if served is None:
        return [model_entry(model)]
    first, *registry = await _model_entries(served)
    return [{**first, **model_entry(model)}, *registry]


def model_entry(model: ServedModel) -> dict[str, object]:
    """A model that was loaded while serving, as it is listed."""
    return {
        "id": model.spec.name, "object": "model", "created": model.since, "owned_by": "rwkv",
        "status": model.status.value, "error": model.error, "file": Path(model.spec.file).name,
        "defaults": model.spec.defaults.given,
    }  # fmt: skip


async def models(context: Context, query: dict[str, str]) -> HandlerResponse:
    """The models that are served, alone and with each tuned state or adapter, and those that are being loaded."""
    return json_response({"object": "list", "data": list((await _entries_by_name(context)).values())})


class ModelQuery(Fields):
    """Which model is asked for."""

    model: str = Field(min_length=1, description="The model's id, as the list of models has it.")


async def model(context: Context, upload: Upload) -> HandlerResponse:
    """The model of that id, if it is one that is served, or is to be."""
    requested, served = upload.query.model, await _entries_by_name(context)
    if requested not in served and context.models is not None:
        await context.models.wait_until_known(context, requested, context.config.engine_wait_s)
        served = await _entries_by_name(context)
    if requested not in served:
        given = error_value(requested)
        message = f"model: no model {given!r} is served here, only {', '.join(map(repr, served))}"
        raise ServiceError(ErrorKind.MODEL_NOT_FOUND, message, field="model", given=given)
    return json_response(served[requested])


class LoadBody(Body):
    """A model to load."""

    file: str = Field(min_length=1, max_length=4096, description="Path of the weights within --models-dir.")
    name: str = Field("", max_length=64, description="What requests will call it; without one the file's name.")
    adapters: list[Annotated[str, Field(max_length=4096)]] = Field(
        [],
        max_length=16,
        description="Adapters to merge into the weights, each a path within --models-dir or path:scale.",
    )
    dtype: Annotated[str, OneOf(DTYPES)] = Field("", description="As --dtype, which holds without it.")
    wkv_state: Annotated[str, OneOf(WKV_STATES)] = Field(
        "", description="As --wkv-state, which holds without it for RWKV-7; older versions have fp32 alone."
    )
    kernels: Annotated[str, OneOf(KERNELS)] = Field(
        "", description="As --kernels, which holds without it where these serve the model and its devices; else auto."
    )
    devices: list[Device] = Field([], max_length=64, description="As --pp-devices, which holds without it.")
    gpu_memory_utilization: float | None = Field(
        None, ge=0.05, le=1, description="Part of a GPU's memory that this model may fill, as the flag says it."
    )
    max_running: int | None = Field(None, ge=0, le=1_000_000, description="As --max-running.")
    defaults: DefaultsFields | None = Field(
        None, description="Decode parameters of requests that name the model and do not give them."
    )
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds that the answer waits until it is ready or failed.")


class UnloadBody(Body):
    """A model to unload."""

    name: str = Field(min_length=1, max_length=64, description="The model's name.")
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds that the answer waits until it has gone.")


async def load(context: Context, body: LoadBody) -> HandlerResponse:
    """Begin to load a model beside what is served, which goes on. GET /v1/models/{name} says how it stands."""
    return json_response(model_entry(await loaded_models(context).load(model_spec(context, body), body.wait_s or None)))


def model_spec(context: Context, body: LoadBody) -> ModelSpec:
    """What is to be loaded. Raises ServiceError for a name or a file that there cannot be."""
    path = resolve_model_path(context, body.file, "file")
    name = body.name or re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:64]
    if not MODEL_NAME.fullmatch(name):
        raise invalid("name", "must be 1..64 letters, digits, '.', '_' and '-', beginning with one of the first", name)
    return ModelSpec(
        name=name,
        file=str(path),
        adapters=tuple(_adapter(context, entry) for entry in body.adapters),
        dtype=body.dtype,
        wkv_state=body.wkv_state,
        kernels=body.kernels,
        devices=tuple(f"cuda:{one}" if one.isdecimal() else one for one in body.devices),
        gpu_memory_utilization=body.gpu_memory_utilization,
        max_running=body.max_running,
        defaults=as_defaults(body.defaults, context.config),
    )


async def unload(context: Context, body: UnloadBody) -> HandlerResponse:
    """Let a model's running answers end, store its sessions, and give its memory back."""
    registry = loaded_models(context)
    await registry.unload(body.name, body.wait_s or None)
    is_here = any(
        one.spec.name == body.name for one in registry.registered
    )  # and the table may not yet say that it leaves
    status = ModelStatus.UNLOADING.value if is_here else "unloaded"
    return json_response({"id": body.name, "object": "model", "status": status})


def loaded_models(context: Context) -> Models:
    """The models beside the service's own. Raises ServiceError where there can be none."""
    if context.models is None:
        raise invalid("name", "means no model that could be loaded or unloaded: this process serves one", "")
    return context.models


def _adapter(context: Context, entry: str) -> str:
    """An adapter as --adapter has it: the path, and the scale if one is given."""
    file, colon, scale = entry.rpartition(":")
    if not colon or not _SCALE.fullmatch(scale):
        file, colon, scale = entry, "", ""
    path = resolve_model_path(context, file, "adapters")
    check_adapter_within(context.config.models_dir, path, "adapters")
    return f"{path}{colon}{scale}"


def resolve_model_path(context: Context, file: str, field: str) -> Path:
    """The path of a file that a request's field names. Raises ServiceError unless it is within --models-dir."""
    if not context.config.models_dir:
        raise invalid(field, "cannot be read: no folder is open to requests; start with --models-dir", file)
    path = within(context.config.models_dir, file)
    if path is None or path.suffix not in MODEL_SUFFIXES or not os.path.isfile(path):  # noqa: PTH113 - False for a name that is too long, too
        raise invalid(field, f"must be the path of a {' or '.join(MODEL_SUFFIXES)} file within --models-dir", file)
    return path


def model_route(path: str) -> Route:
    """Where OpenAI's SDKs ask for one model."""
    return Route(
        "GET",
        path,
        model,
        None,
        "One model.",
        answer=Model,
        query=ModelQuery,
        is_about_models=True,
        error_format=OPENAI_ERRORS,
        errors=(ErrorKind.MODEL_NOT_FOUND,),
        example={"model": "rwkv7"},
    )


ROUTES = (
    Route("GET", "/v1/models", models, None, "The models served.", answer=ModelList),
    model_route("/v1/models/{model}"),
    Route(
        "POST",
        "/v1/models/load",
        load,
        LoadBody,
        "Load a model beside the others.",
        answer=LoadedModel,
        errors=(ErrorKind.NAME_TAKEN, ErrorKind.MODEL_NOT_FOUND),
        example={"file": "rwkv7-g1-0.4b.safetensors", "name": "small"},
        is_admin=True,
        is_about_models=True,
    ),
    Route(
        "POST",
        "/v1/models/unload",
        unload,
        UnloadBody,
        "Unload such a model.",
        answer=LoadedModel,
        errors=(ErrorKind.MODEL_NOT_FOUND,),
        example={"name": "small"},
        is_admin=True,
        is_about_models=True,
    ),
)
