"""`/v1/models`: lists the served models, loads and unloads models."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from routes.context import Context, Models
from routes.fine_tuning.store import JobStore
from routes.openai.files import call_store
from routes.request.bodies import Body
from routes.request.decode_defaults import DefaultsFields, as_defaults
from routes.request.fields import Device, Fields, one_of
from routes.request.model_names import LATEST, TUNED_PREFIX, adapter_names, model_not_found, parse_model_id, state_names
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import OPENAI_ERRORS, HandlerResponse, json_response, timestamp
from routes.response.loaded_models import LoadedModel, Model, ModelList
from routes.route import Routes
from rwkv_batch.calls import ListAdapters, ListStates
from rwkv_batch.config import DTYPES, KERNELS, WKV_STATES
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE
from rwkv_batch.ipc.served_model import MODEL_NAME, ModelSpec, ModelStatus, ServedModel
from rwkv_batch.models_folder import check_adapter_within, within

ROUTES = Routes()

MODEL_SUFFIXES = (".pth", ".safetensors", ".gguf")
KINDS = f"{', '.join(MODEL_SUFFIXES[:-1])} or {MODEL_SUFFIXES[-1]}"
MAX_LISTED = 10
"""Files of --models-dir that an error names."""
_SCALE = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


async def model_names(context: Context) -> dict[str, int]:
    """Return the names of a model, with their times of loading.

    They are the model's own name, and its names with each usable tuned state and adapter. Without states and adapters
    if its engine is away.
    """
    name = context.config.model_name
    created = {name: context.started}
    try:
        states, adapters = await call_engine(context, ListStates()), await call_engine(context, ListAdapters())
    except ServiceError as error:
        if error.info.kind not in ENGINE_GONE:
            raise
        states, adapters = [], []
    for info in states:
        if not info.error and not info.name.startswith(TUNED_PREFIX):
            created |= dict.fromkeys(state_names(name, info.name), info.created)
    for adapter in adapters:
        if not adapter.error and not adapter.name.startswith(TUNED_PREFIX):
            created |= dict.fromkeys(adapter_names(name, adapter.name), adapter.created)
    if context.files is not None:
        jobs = await call_store(JobStore(context.files).models, "tuned models cannot be read", current_request().owner)
        mine = {str(job.fine_tuned_model): job.finished_at or 0 for job in jobs if job.model == name}
        loaded = {state.name for state in states if not state.error}
        loaded |= {adapter.name for adapter in adapters if not adapter.error}
        created |= {one: at for one, at in mine.items() if (tuned := parse_model_id(one)) and tuned.name in loaded}
    return created


async def _model_entries(context: Context) -> list[dict[str, object]]:
    created = await model_names(context)
    return [{"id": name, "object": "model", "created": at, "owned_by": "rwkv"} for name, at in created.items()]


async def _entries_by_name(context: Context) -> dict[str, dict[str, object]]:
    """Return all valid values of `model` by name. Includes the models that are not ready."""
    entries = await _model_entries(context)
    for name in [model.spec.name for model in context.models.registered] if context.models is not None else ():
        entries += await _loaded_entries(context, name)
    return {str(entry["id"]): entry for entry in entries}


async def _loaded_entries(context: Context, name: str) -> list[dict[str, object]]:
    """Return the entries of a model loaded at run time. It may have gone while the caller awaited, so look it up."""
    model = context.models.find(name) if context.models is not None else None
    if context.models is None or model is None:
        return []
    served = context.models.ready_context(model)
    if served is None:
        return [model_entry(model)]
    first, *registry = await _model_entries(served)
    return [{**first, **model_entry(model)}, *registry]


def model_entry(model: ServedModel) -> dict[str, object]:
    """Return the list entry of a model loaded at run time."""
    return {
        "id": model.spec.name, "object": "model", "created": model.since, "owned_by": "rwkv",
        "status": model.status.value, "loaded": round(model.loaded, 2), "error": model.error,
        "file": Path(model.spec.file).name, "defaults": model.spec.defaults.given,
    }  # fmt: skip


@ROUTES.add("GET", "/v1/models", "The served models.", answer=ModelList, error_format=OPENAI_ERRORS)
async def models(context: Context) -> HandlerResponse:
    """List the served models, and the models that are loading.

    The list includes the tuned states and adapters of each served model. The entries have the fields of OpenAI's and of
    Anthropic's API.
    """
    data = [_listed(entry) for entry in (await _entries_by_name(context)).values()]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data, **page})


def _listed(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with Anthropic's fields."""
    return {**entry, "type": "model", "display_name": entry["id"], "created_at": timestamp(entry["created"])}


class ModelQuery(Fields):
    """The model to return."""

    model: str = Field(min_length=1, description="The model's id, as in the list of models.")


@ROUTES.add(
    "GET",
    "/v1/models/{model}",
    "One model.",
    answer=Model,
    is_about_models=True,
    error_format=OPENAI_ERRORS,
    errors=(ErrorKind.MODEL_NOT_FOUND,),
    example={"model": "rwkv7"},
)
async def model(context: Context, query: ModelQuery) -> HandlerResponse:
    """Return the model with that id."""
    requested, served = query.model.removesuffix(LATEST), await _entries_by_name(context)
    if requested not in served and context.models is not None:
        await context.models.wait_until_known(context, requested, context.config.engine_wait_s)
        served = await _entries_by_name(context)
    if requested not in served:
        raise model_not_found(requested, served)
    return json_response(_listed(served[requested]))


class LoadBody(Body):
    """A model to load."""

    file: str = Field(min_length=1, max_length=4096, description="Path of the weights within --models-dir.")
    name: str = Field("", max_length=64, description="The model's name in requests. Default: the file's name.")
    adapters: list[Annotated[str, Field(max_length=4096)]] = Field(
        [], max_length=16, description="Adapters to merge into the weights: path within --models-dir, or path:scale."
    )
    dtype: Annotated[str, one_of(DTYPES)] = Field("", description="Like --dtype, which is the default.")
    wkv_state: Annotated[str, one_of(WKV_STATES)] = Field(
        "", description="Like --wkv-state, which is the default for RWKV-7. Older versions support fp32 only."
    )
    kernels: Annotated[str, one_of(KERNELS)] = Field(
        "", description="Like --kernels, which is the default if it supports the model and its devices. Else auto."
    )
    devices: list[Device] = Field([], max_length=64, description="Like --pp-devices, which is the default.")
    gpu_memory_utilization: float | None = Field(
        None, ge=0.05, le=1, description="Fraction of a GPU's memory for this model, like --gpu-memory-utilization."
    )
    max_running: int | None = Field(None, ge=0, le=1_000_000, description="Like --max-running.")
    defaults: DefaultsFields | None = Field(
        None, description="Decode parameters for requests that name the model and give none."
    )
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds to wait until the model is ready or failed.")


class UnloadBody(Body):
    """A model to unload."""

    name: str = Field(min_length=1, max_length=64, description="The model's name.")
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds to wait until the model is unloaded.")


@ROUTES.add(
    "POST",
    "/v1/models/load",
    "Load a model.",
    answer=LoadedModel,
    errors=(ErrorKind.NAME_TAKEN, ErrorKind.MODEL_NOT_FOUND),
    example={"file": "rwkv7-g1-0.4b.safetensors", "name": "small"},
    is_admin=True,
    is_about_models=True,
)
async def load(context: Context, body: LoadBody) -> HandlerResponse:
    """Start to load a model. Others continue to serve. GET /v1/models/{name} shows its status."""
    return json_response(model_entry(await loaded_models(context).load(model_spec(context, body), body.wait_s or None)))


def model_spec(context: Context, body: LoadBody) -> ModelSpec:
    """Return the spec of the model to load. Raises ServiceError for an invalid name or file."""
    path = resolve_model_path(context, body.file, "file")
    name = body.name or re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:64]
    if not MODEL_NAME.fullmatch(name):
        raise invalid(
            "name", "must be 1 to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit", name
        )
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


@ROUTES.add(
    "POST",
    "/v1/models/unload",
    "Unload a model.",
    answer=LoadedModel,
    errors=(ErrorKind.MODEL_NOT_FOUND,),
    example={"name": "small"},
    is_admin=True,
    is_about_models=True,
)
async def unload(context: Context, body: UnloadBody) -> HandlerResponse:
    """Unload a model after its running answers have ended. Its sessions are stored and its memory is freed."""
    registry = loaded_models(context)
    await registry.unload(body.name, body.wait_s or None)
    is_here = any(one.spec.name == body.name for one in registry.registered)  # the list may not show yet that it leaves
    status = ModelStatus.UNLOADING.value if is_here else "unloaded"
    return json_response({"id": body.name, "object": "model", "status": status})


def loaded_models(context: Context) -> Models:
    """Return the registry of loaded models. Raises ServiceError in a process that serves only one."""
    if context.models is None:
        raise invalid("name", "means no model that can be loaded or unloaded: this process serves only one", "")
    return context.models


def _adapter(context: Context, entry: str) -> str:
    """Return an adapter in the format of --adapter: the path, and the scale if given."""
    file, colon, scale = entry.rpartition(":")
    if not colon or not _SCALE.fullmatch(scale):
        file, colon, scale = entry, "", ""
    path = resolve_model_path(context, file, "adapters")
    check_adapter_within(context.config.models_dir, path, "adapters")
    return f"{path}{colon}{scale}"


def resolve_model_path(context: Context, file: str, field: str) -> Path:
    """Return the path of a model file. Raises ServiceError unless it is within --models-dir."""
    if not context.config.models_dir:
        raise invalid(field, "the service has no models folder; start it with --models-dir", file)
    path = within(context.config.models_dir, file)
    if path is None or path.suffix not in MODEL_SUFFIXES or not os.path.isfile(path):  # noqa: PTH113 - False for a name that is too long, too
        found = sorted(one.name for one in Path(context.config.models_dir).iterdir() if one.suffix in MODEL_SUFFIXES)
        known = f"which has {', '.join(found[:MAX_LISTED])}" if found else "which has none"
        raise invalid(field, f"must be the path of a {KINDS} file within --models-dir, {known}", file)
    return path
