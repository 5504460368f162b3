"""RWKV-Infer's routes, for its users' scripts. They do the same as /v1/models and /v1/states.

States go to the model that was loaded last, or to the service's own. RWKV-Infer allows any character in names. Here '-'
replaces characters that are not allowed, and requests may use either name. A new model replaces the loaded model of the
same name after its files have been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import ConfigDict, Field

from routes.context import Context
from routes.models import LoadBody, loaded_models, model_spec
from routes.models import models as openai_models
from routes.openai import chat
from routes.request.bodies import Body, Weights
from routes.request.fields import Number, rename_fields, unescaped
from routes.request.json_body import validate
from routes.request.model_names import base_name, sanitize_name, state_names
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import RwkvInferDone, RwkvInferHealth
from routes.route import Routes
from rwkv_batch.calls import AddState, CheckModel, DecodeDefaults, ListStates, RemoveState, StateInfo
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError, invalid
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus
from rwkv_batch.models_folder import relative_to_folder

ROUTES = Routes()

STRATEGIES = {
    "": "", "None": "", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8",
    "int8": "int8", "fp16i8": "int8", "bf16i8": "int8",
}  # fmt: skip
"""`model_strategy` -> --dtype."""
ADAPTER_MODES = {"lora": True, "bone": False, "disha": False}
"""`adapter_mode` -> whether `adapter_scaling` applies."""
_LOAD_TIMEOUT_S = 3600.0
_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)
_CHANGE: dict[str, Any] = {
    "answer": RwkvInferDone,
    "errors": (
        ErrorKind.NAME_TAKEN,
        ErrorKind.MODEL_NOT_FOUND,
        ErrorKind.STATE_NOT_FOUND,
        ErrorKind.OVERLOADED,
        *_ENGINE_ERRORS,
    ),
    "is_admin": True,
    "is_about_models": True,
    "waits_for_engine": True,
}
"""Fields of the routes that load and remove."""


class DefaultFields(Body):
    """Default decode parameters of a model or a state."""

    model_config = ConfigDict(protected_namespaces=())

    default_temperature: Number | None = Field(None, ge=0, le=100, description="Temperature of requests without one.")
    default_top_p: Number | None = Field(None, ge=0, le=1, description="top_p of requests without one.")


class LoadModelBody(DefaultFields):
    """A model to load."""

    model_filename: str = Field(min_length=1, max_length=4096, description="Path of the weights within --models-dir.")
    model_viewname: str = Field(
        "default model", min_length=1, max_length=64, description="The model's name in requests."
    )
    model_strategy: str = Field("", max_length=64, description=f"One of {', '.join(filter(None, STRATEGIES))}.")
    adapter_filename: str = Field("", max_length=4096, description="Path of an adapter within --models-dir.")
    adapter_mode: str = Field("", max_length=64, description=f"Type of the adapter: {', '.join(ADAPTER_MODES)}.")
    adapter_scaling: Number = Field(2.0, ge=0, le=1000, description="Scale of a LoRA.")
    template: str = Field("world", max_length=64, description="Only world.")
    endtoken: str | None = Field(
        None, min_length=1, max_length=256, description="Text that ends an answer. \\n is a newline."
    )


class LoadStateBody(DefaultFields):
    """A tuned state to load."""

    state_filename: str = Field(min_length=1, max_length=4096, description="Path of the file within --models-dir.")
    state_viewname: str = Field(
        min_length=1, max_length=64, description="The state's name. Requests use `<model> <name>`."
    )


class GatingBody(DefaultFields):
    """Weights of a mixture of states."""

    state_viewname: str = Field(
        min_length=1, max_length=128, description="The mixture's name, alone or as `<model> <name>`."
    )
    state_gatingweight: Weights = Field([], description="One weight per state. Empty: equal weights.")


class LoadMixtureBody(GatingBody):
    """Tuned states to load and mix."""

    state_viewname: str = Field(
        min_length=1, max_length=62, description="The mixture's name. Requests use `<model> <name>`."
    )
    state_filenames: list[str] = Field(min_length=1, max_length=16, description="Paths within --models-dir.")
    contain_originalstate: bool | Literal["True", "False"] = Field(
        False, description="Whether to add the empty state as the last member."
    )


def _last_loaded_model(context: Context) -> str | None:
    here = (ModelStatus.READY, ModelStatus.LOADING)
    registered = [
        one for one in (context.models.registered if context.models is not None else ()) if one.status in here
    ]
    return max(registered, key=lambda one: one.since).spec.name if registered else None


async def _target_context(context: Context) -> Context:
    """Return the context of the model that states belong to. Raises ServiceError."""
    return await context.wait_for_model(_last_loaded_model(context))


def _defaults(body: DefaultFields, end: str | None = None) -> DecodeDefaults:
    stops = None if end is None else (0, unescaped("endtoken", end))
    return DecodeDefaults(temperature=body.default_temperature, top_p=body.default_top_p, stop_tokens=stops)


def _success() -> HandlerResponse:
    return json_response({"status": "success"})


@ROUTES.add("GET", "/healthcheck", "RWKV-Infer: health check.", answer=RwkvInferHealth, is_public=True)
async def healthcheck(context: Context) -> HandlerResponse:
    """Return ok: this HTTP worker is alive."""
    return json_response({"message": "ok", "status_code": 200})


ROUTES.append(chat.ROUTES[0].at("/chat/completions", summary="RWKV-Infer: same as `/openai/v1/chat/completions`."))


@ROUTES.add("GET", "/models", "RWKV-Infer: list models.", errors=_ENGINE_ERRORS, waits_for_engine=True)
async def models(context: Context) -> HandlerResponse:
    """List the model that was loaded last, or the service's own. The list includes each of the model's states.

    OpenAI's SDKs get the answer of `/openai/v1/models`, so their `base_url` may lack the path.
    """
    if current_request().is_from_openai_sdk:
        return await openai_models(context)
    context = await _target_context(context)
    name = context.config.model_name
    states = [info.name for info in await call_engine(context, ListStates()) if not info.error]
    return json_response(
        [{"object": "models", "id": one} for one in (name, *(state_names(name, s)[1] for s in states))]
    )


@ROUTES.add(
    "POST",
    "/loadmodel",
    "RWKV-Infer: load a model.",
    example={"model_filename": "models/small.pth", "model_viewname": "RWKV x070 0.4B", "model_strategy": ""},
    **_CHANGE,
)
async def load(context: Context, body: LoadModelBody) -> HandlerResponse:
    """Load a model and answer when it is ready."""
    given = validate(
        LoadBody,
        {
            "file": body.model_filename,
            "name": sanitize_name(body.model_viewname),
            "dtype": _dtype(body),
            "adapters": _adapters(body),
            "defaults": _defaults(body, body.endtoken).given,
        },
    )
    with rename_fields(file="model_filename", name="model_viewname", adapters="adapter_filename"):
        spec = model_spec(context, given)
        await _replace_same_name(context, spec)
        model = await loaded_models(context).load(spec, _LOAD_TIMEOUT_S)
    if model.status is ModelStatus.FAILED:
        raise invalid("model_filename", f"could not be loaded: {model.error}", body.model_filename)
    if model.status is not ModelStatus.READY:
        message = (
            f"model_filename: {model.spec.name!r} is {model.status.value}; GET /v1/models/{model.spec.name} shows "
            "its status"
        )
        raise ServiceError(ErrorKind.ENGINE_LOST, message, field="model_filename")
    return _success()


async def _replace_same_name(context: Context, spec: ModelSpec) -> None:
    """Check the files, then unload the loaded model of the same name. Raises ServiceError.

    If no engine can check the files, no model is unloaded, and loading fails for a taken name.
    """
    checking_context = _checking_context(context, spec.name)
    if checking_context is None:
        return
    try:
        await call_engine(checking_context, CheckModel(spec.file, spec.adapters))
    except ServiceError as error:
        raise _error_with_request_fields(context.config.models_dir, spec, error.info) from None
    others = loaded_models(context)
    if any(one.spec.name == spec.name and one.status is not ModelStatus.FAILED for one in others.registered):
        try:
            await others.unload(spec.name, _LOAD_TIMEOUT_S)
        except ServiceError as error:
            if error.info.kind is not ErrorKind.MODEL_NOT_FOUND:  # it was unloaded, and the list is not updated yet
                raise


def _error_with_request_fields(folder: str, spec: ModelSpec, info: ErrorInfo) -> ServiceError:
    """Return an error about a model's files with the request's field names."""
    requested = {"file": spec.file, "adapters": ", ".join(spec.adapters)}.get(info.field or "")
    if requested is None:
        return ServiceError.from_info(info)
    message, given = relative_to_folder(folder, info.message), relative_to_folder(folder, requested)
    return ServiceError(info.kind, message, field=info.field, given=given)


def _checking_context(context: Context, name: str) -> Context | None:
    """Return a context whose engine reads this machine's files. None if there is none.

    In a cluster, engines of the service's own model may run anywhere. Models loaded at run time are on this machine.
    """
    others = loaded_models(context)
    if not any(engine.node for engine in others.engines):
        return context
    here = {one.spec.name for one in others.registered if one.status is ModelStatus.READY}
    return context.for_model(name if name in here else min(here)) if here else None


def _dtype(body: LoadModelBody) -> str:
    """Return the dtype. Raises ServiceError for an unsupported strategy or template."""
    if body.template != "world":
        raise invalid("template", "must be world, the only template of the models served here", body.template)
    if body.model_strategy not in STRATEGIES:
        names = ", ".join(filter(None, STRATEGIES))
        raise invalid("model_strategy", f"must be one of {names}, or empty", body.model_strategy)
    return STRATEGIES[body.model_strategy]


def _adapters(body: LoadModelBody) -> list[str]:
    """Return the adapters to merge. Raises ServiceError for an unsupported type."""
    if not body.adapter_filename:
        return []
    if body.adapter_mode not in ADAPTER_MODES:
        names = ", ".join(ADAPTER_MODES)
        raise invalid("adapter_mode", f"must be one of {names}", body.adapter_mode)
    is_scaled = ADAPTER_MODES[body.adapter_mode]
    return [f"{body.adapter_filename}:{body.adapter_scaling}" if is_scaled else body.adapter_filename]


@ROUTES.add("POST", "/removemodel", "RWKV-Infer: unload the last model.", **{**_CHANGE, "waits_for_engine": False})
async def remove(context: Context) -> HandlerResponse:
    """Unload the model that was loaded last. The service's own model stays."""
    name = _last_loaded_model(context)
    if name is None:
        message = f"no loaded model can be removed; {context.config.model_name!r} is the service's own"
        raise ServiceError(ErrorKind.MODEL_NOT_FOUND, message)
    await loaded_models(context).unload(name, _LOAD_TIMEOUT_S)
    return _success()


@ROUTES.add(
    "POST",
    "/loadstatemodel",
    "RWKV-Infer: load a tuned state.",
    example={"state_filename": "states/poet.pth", "state_viewname": "Poet", "default_temperature": "1.0"},
    **_CHANGE,
)
async def load_state(context: Context, body: LoadStateBody) -> HandlerResponse:
    """Load a tuned state."""
    with rename_fields(file="state_filename", name="state_viewname"):
        call = AddState(sanitize_name(body.state_viewname), body.state_filename, defaults=_defaults(body))
        await call_engine(await _target_context(context), call)
    return _success()


@ROUTES.add(
    "POST",
    "/mrss_loadstatemodel",
    "RWKV-Infer: load tuned states and mix them.",
    example={"state_viewname": "Duo", "state_filenames": ["states/a.pth"], "contain_originalstate": "True"},
    **_CHANGE,
)
async def load_mixture(context: Context, body: LoadMixtureBody) -> HandlerResponse:
    """Load tuned states as `<name>.0`, `<name>.1`, … and their mixture as `<name>`. On an error, nothing is loaded."""
    context, name = await _target_context(context), sanitize_name(body.state_viewname)
    names = [f"{name}.{i}" for i in range(len(body.state_filenames))]
    members = [*names, ""] if body.contain_originalstate in (True, "True") else names
    mixture = _pair_weights(members, body.state_gatingweight)
    added: list[str] = []
    try:
        with rename_fields(file="state_filenames", name="state_viewname", states="state_gatingweight"):
            for one, file in zip(names, body.state_filenames, strict=True):
                await call_engine(context, AddState(one, file))
                added.append(one)
            await call_engine(context, AddState(name, mixture=mixture, defaults=_defaults(body)))
    except ServiceError:
        for one in added:
            await call_engine(context, RemoveState(one))
        raise
    return _success()


@ROUTES.add(
    "POST",
    "/mrss_set_gatingweight",
    "RWKV-Infer: change a mixture's weights.",
    example={"state_viewname": "Duo", "state_gatingweight": ["0.7", "0.3"]},
    **_CHANGE,
)
async def set_gating(context: Context, body: GatingBody) -> HandlerResponse:
    """Set a mixture's weights, and its default decode parameters if given."""
    context = await _target_context(context)
    given, model = body.state_viewname, context.config.model_name
    name = sanitize_name(given[len(model) + 1 :] if base_name(given, model) is not None else given)
    info = next((one for one in await call_engine(context, ListStates()) if one.name == name and one.mixture), None)
    if info is None:
        message = f"state_viewname: there is no mixture of states {name!r}; GET /v1/states lists the states"
        raise ServiceError(ErrorKind.STATE_NOT_FOUND, message, field="state_viewname", given=given)
    with rename_fields(states="state_gatingweight"):
        await call_engine(context, _change_weights(info, body))
    return _success()


def _change_weights(info: StateInfo, body: GatingBody) -> AddState:
    mixture = _pair_weights([name for name, _ in info.mixture], body.state_gatingweight)
    defaults = msgspec.convert(info.defaults.given | _defaults(body).given, DecodeDefaults)
    return AddState(info.name, mixture=mixture, defaults=defaults, replace=True)


def _pair_weights(names: Sequence[str], weights: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """Pair names and weights. Raises ServiceError unless there is one weight per name."""
    if weights and len(weights) != len(names):
        message = f"must have one weight for each of {len(names)} states, got {len(weights)}"
        raise invalid("state_gatingweight", message, list(weights))
    return tuple(zip(names, weights or [1.0] * len(names), strict=True))


@ROUTES.add("POST", "/removestatemodel", "RWKV-Infer: remove all tuned states.", **_CHANGE)
async def remove_states(context: Context) -> HandlerResponse:
    """Remove all tuned states and mixtures of the model."""
    context = await _target_context(context)
    for info in await call_engine(context, ListStates()):
        await call_engine(context, RemoveState(info.name))
    return _success()
