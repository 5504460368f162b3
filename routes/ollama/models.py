"""Ollama's routes about models: lists, one model, version, and the refusal of changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from routes.context import Context
from routes.models import model_names
from routes.ollama.answers import OllamaModelList, OllamaShown, OllamaStatus, OllamaVersion
from routes.ollama.generation import OLLAMA_ERRORS
from routes.request.bodies import Body, SamplingBody
from routes.request.fields import IgnoredValue, Repeated
from routes.request.model_names import LATEST, model_not_found
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response, timestamp
from routes.route import Routes
from rwkv_batch.calls import GetStatus
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.served_model import DEFAULT_MODEL_NAME

ROUTES = Routes(error_format=OLLAMA_ERRORS)
_LOST = (ErrorKind.ENGINE_LOST,)

API_VERSION = "0.12.0"
"""Numbers and dots only: clients compare it."""
_NEVER = "9999-12-31T23:59:59Z"
_TEMPLATE = "{{ if .System }}System: {{ .System }}\n\n{{ end }}User: {{ .Prompt }}\n\nAssistant: {{ .Response }}"
_PARAMETERS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "presence_penalty": "alpha_presence",
    "frequency_penalty": "alpha_frequency", "num_predict": "max_tokens",
}  # fmt: skip
"""Ollama's name of a default -> ours."""
_THOUSAND = 1000


def _tagged(name: str) -> str:
    """Return a name with a tag: the state, or "latest"."""
    return name if ":" in name else name + LATEST


def _contexts(context: Context) -> Iterator[Context]:
    """Yield the contexts of the own model and of other ready models."""
    yield context
    for model in context.models.registered if context.models is not None else ():
        served = context.models.ready_context(model) if context.models is not None else None
        if served is not None:
            yield served


async def _entries(context: Context) -> list[dict[str, Any]]:
    """Return the entries of a model with each state and adapter. Raises ServiceError."""
    status = await call_engine(context, GetStatus())
    family = status.get("model_version", "RWKV-7").lower().replace("-", "")
    details = {
        "parent_model": "",
        "format": Path(status.get("model_file", "")).suffix.lstrip("."),
        "family": family,
        "families": [family],
        "parameter_size": _size(status.get("parameters", 0)),
        "quantization_level": status["dtype"].upper().replace("FLOAT", "F"),
    }
    entries = []
    for name, created in (await model_names(context)).items():
        if " " in name:  # an older form of the name with a colon
            continue
        digest = hashlib.sha256(f"{status['fingerprint']} {name}".encode()).hexdigest()
        entry = {"name": _tagged(name), "model": _tagged(name), "modified_at": timestamp(created), "digest": digest}
        entries.append({**entry, "size": status.get("weight_bytes", 0), "details": details})
    return entries


def _size(parameters: float) -> str:
    """Return a number of parameters like 1.5B."""
    for unit in ("", "K", "M"):
        if parameters < _THOUSAND:
            return f"{parameters:.4g}{unit}"
        parameters /= _THOUSAND
    return f"{parameters:.4g}B"


@ROUTES.add(
    "GET", "/api/tags", "Ollama: the served models.", answer=OllamaModelList, errors=_LOST, waits_for_engine=True
)
async def tags(context: Context) -> HandlerResponse:
    """List the served models, each with its states and adapters."""
    return json_response({"models": [entry for one in _contexts(context) for entry in await _entries(one)]})


@ROUTES.add("GET", "/api/ps", "Ollama: the loaded models.", answer=OllamaModelList, errors=_LOST, waits_for_engine=True)
async def running(context: Context) -> HandlerResponse:
    """List the served models. They stay loaded."""
    models = []
    for one in _contexts(context):
        entry = (await _entries(one))[0]
        on_gpu = any(str(device).startswith("cuda:") for device in (await call_engine(one, GetStatus()))["devices"])
        fields = {"expires_at": _NEVER, "size_vram": entry["size"] if on_gpu else 0}
        models.append({**entry, **fields, "context_length": one.config.max_prompt_tokens})
    return json_response({"models": models})


_ABOUT_ONE: dict[str, Any] = {
    "errors": (ErrorKind.ENGINE_LOST, ErrorKind.MODEL_NOT_FOUND),
    "waits_for_engine": True,
    "is_about_models": True,
    "example": {"model": "rwkv7"},
}


class OllamaNameBody(Body):
    """The name of a model."""

    model: str = Field("", max_length=256, description="A name of `/api/tags`, with or without :latest.")
    name: str = Field("", max_length=256, description="Older name of `model`.")

    @property
    def requested(self) -> str:
        return self.model or self.name


class OllamaShowBody(OllamaNameBody):
    """The model to show."""

    verbose: Repeated = Field(None, description="Accepted: there is nothing more to show.")
    system: IgnoredValue = Field(None, description="Accepted and ignored.")
    template: IgnoredValue = Field(None, description="Accepted and ignored.")
    options: IgnoredValue = Field(None, description="Accepted and ignored.")


class OllamaPullBody(OllamaNameBody):
    """The model to download."""

    insecure: Repeated = Field(None, description="Accepted and not read: nothing is downloaded.")
    stream: Repeated = Field(None, description="Accepted: the answer is one line.")


async def _find(context: Context, requested: str, remedy: str = "") -> tuple[Context, dict[str, Any]]:
    """Return the context and the entry of a model. Raises ServiceError if it is not served."""
    if context.models is not None:
        await context.models.wait_until_known(context, requested, context.config.engine_wait_s)
    names = []
    for one in _contexts(context):
        for entry in await _entries(one):
            if _tagged(requested) in (entry["name"], DEFAULT_MODEL_NAME + LATEST):
                return one, entry
            names.append(entry["name"])
    raise model_not_found(requested, names, remedy)


@ROUTES.add("POST", "/api/show", "Ollama: one model.", answer=OllamaShown, **_ABOUT_ONE)
async def show(context: Context, body: OllamaShowBody) -> HandlerResponse:
    """Return a model's architecture, prompt format, defaults and capabilities."""
    served, entry = await _find(context, body.requested)
    status = await call_engine(served, GetStatus())
    shape, family = status.get("model_shape", {}), entry["details"]["family"]
    info = {
        "general.architecture": family,
        "general.basename": served.config.model_name,
        "general.parameter_count": status.get("parameters", 0),
        f"{family}.context_length": served.config.max_prompt_tokens,
        f"{family}.block_count": shape.get("layers", 0),
        f"{family}.embedding_length": shape.get("width", 0),
        f"{family}.attention.head_count": shape.get("heads", 0),
        f"{family}.vocab_size": shape.get("vocab", 0),
    }
    defaults = {name: field.default for name, field in SamplingBody.model_fields.items()} | served.defaults.given
    return json_response(
        {
            "modified_at": entry["modified_at"],
            "details": entry["details"],
            "model_info": info,
            "capabilities": ["completion", "tools", "thinking", "insert"],
            "template": _TEMPLATE,
            "parameters": "\n".join(f"{name} {defaults[ours]}" for name, ours in _PARAMETERS.items()),
            "modelfile": "",
        }
    )


@ROUTES.add("GET", "/api/version", "Ollama: the version.", answer=OllamaVersion)
async def version(context: Context) -> HandlerResponse:
    """Return the version of Ollama's API that these routes have."""
    return json_response({"version": API_VERSION})


@ROUTES.add("POST", "/api/pull", "Ollama: succeeds for a served model.", answer=OllamaStatus, **_ABOUT_ONE)
async def pull(context: Context, body: OllamaPullBody) -> HandlerResponse:
    """Succeed for a model that is served. Nothing is downloaded."""
    await _find(context, body.requested, "; this service downloads no models: load a file with POST /v1/models/load")
    return json_response({"status": "success"})


async def refuse(context: Context) -> HandlerResponse:
    """Not supported: models are files on the service's machine, and they have no embeddings."""
    raise ServiceError(
        ErrorKind.NOT_FOUND,
        "not supported: models are files on the service's machine, and RWKV models have no embeddings; use "
        "/v1/models/load and /v1/models/unload for models, and an embedding model's service for embeddings",
    )


REFUSED = (
    *(("POST", f"/api/{verb}") for verb in ("push", "create", "copy", "embed", "embeddings")),
    ("DELETE", "/api/delete"),
)
for _method, _path in REFUSED:
    ROUTES.add(_method, _path, "Ollama: not supported.", errors=(ErrorKind.NOT_FOUND,))(refuse)
