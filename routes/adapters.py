"""`/v1/adapters`: adapters that rows run under. Any route takes the name of one as `adapter`."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field

from routes.context import Context
from routes.loaded import Kind, routes_of
from routes.request.bodies import Body
from routes.request.model_names import adapter_names
from routes.response.event_stream import ask
from routes.response.reply import Reply, json_answer
from routes.response.response_models import AdapterEntry, AdapterList
from routes.route import Upload
from rwkv_batch.calls import AdapterInfo, AddAdapter, ListAdapters, RemoveAdapter
from rwkv_batch.errors import ErrorKind
from rwkv_batch.models_folder import as_named

PATH = "/v1/adapters"


class AdapterBody(Body):
    """An adapter to load."""

    name: str = Field(
        min_length=1, max_length=64, description="Letters, digits, '.', '_' and '-': what requests will call it."
    )
    file: str = Field(
        min_length=1,
        max_length=4096,
        description="Path within --models-dir: a LoRA, PiSSA or two-dimensional MiSS, or a folder of PEFT's.",
    )
    scale: float | None = Field(
        None, ge=-1000, le=1000, description="What the pairs are multiplied by; without it the file has to say it."
    )


def _shown(context: Context, info: AdapterInfo) -> dict[str, Any]:
    folder = context.config.models_dir
    told = {"file": as_named(folder, info.file), "error": as_named(folder, info.error)}
    return {**msgspec.structs.asdict(info), **told, "models": adapter_names(context.config.model_name, info.name)}


async def list_adapters(context: Context, query: dict[str, str]) -> Reply:
    """The adapters, in the order in which they were loaded."""
    found = await ask(context, ListAdapters())
    return json_answer({"object": "list", "data": [_shown(context, info) for info in found]})


async def add_adapter(context: Context, body: AdapterBody) -> Reply:
    """Load an adapter beside the weights; requests may name it once this is answered."""
    return json_answer(_shown(context, await ask(context, AddAdapter(body.name, body.file, body.scale))))


async def remove_adapter(context: Context, upload: Upload) -> Reply:
    """Forget an adapter. Rows that were admitted before keep it to their end; sessions wait until it is back."""
    return json_answer(_shown(context, await ask(context, RemoveAdapter(upload.query.name))))


KIND = Kind(
    PATH,
    "adapter",
    AdapterBody,
    AdapterEntry,
    AdapterList,
    ErrorKind.ADAPTER_NOT_FOUND,
    {"name": "french", "file": "adapters/french.safetensors", "scale": 1.0},
)
ROUTES = routes_of(KIND, list_adapters, add_adapter, remove_adapter)
