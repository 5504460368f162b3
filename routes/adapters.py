"""`/v1/adapters`: the adapters that requests may name in `adapter`."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from routes.context import Context
from routes.request.bodies import Body
from routes.request.jobs import adapter_names
from routes.resource_routes import ResourceType, make_routes
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, json_response
from routes.response.response_models import AdapterEntry, AdapterList
from routes.route import Upload
from rwkv_batch.calls import AdapterInfo, AddAdapter, ListAdapters, RemoveAdapter
from rwkv_batch.errors import ErrorKind
from rwkv_batch.models_folder import relative_to_folder

PATH = "/v1/adapters"


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


def _to_json(context: Context, info: AdapterInfo) -> dict[str, Any]:
    folder = context.config.models_dir
    paths = {"file": relative_to_folder(folder, info.file), "error": relative_to_folder(folder, info.error)}
    return {**msgspec.structs.asdict(info), **paths, "models": adapter_names(context.config.model_name, info.name)}


async def list_adapters(context: Context, query: dict[str, str]) -> HandlerResponse:
    """List the adapters, oldest first."""
    infos = await call_engine(context, ListAdapters())
    return json_response({"object": "list", "data": [_to_json(context, info) for info in infos]})


async def add_adapter(context: Context, body: AdapterBody) -> HandlerResponse:
    """Load an adapter. Requests may name it after this answer."""
    return json_response(_to_json(context, await call_engine(context, AddAdapter(body.name, body.file, body.scale))))


async def remove_adapter(context: Context, upload: Upload) -> HandlerResponse:
    """Remove an adapter. Admitted rows keep it until they end. Its sessions cannot continue without it."""
    return json_response(_to_json(context, await call_engine(context, RemoveAdapter(upload.query.name))))


RESOURCE = ResourceType(
    PATH,
    "adapter",
    AdapterBody,
    AdapterEntry,
    AdapterList,
    ErrorKind.ADAPTER_NOT_FOUND,
    {"name": "french", "file": "adapters/french.safetensors", "scale": 1.0},
)
ROUTES = make_routes(RESOURCE, list_adapters, add_adapter, remove_adapter)
