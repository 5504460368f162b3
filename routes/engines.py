"""`/v1/engines`: lists, adds, removes and restarts the engines that serve the model."""

from __future__ import annotations

import asyncio
import time

from pydantic import Field

from routes.context import Context
from routes.models import loaded_models
from routes.request.bodies import Body
from routes.request.fields import Device
from routes.response.http_response import HandlerResponse, json_response
from routes.response.loaded_models import EngineList
from routes.route import Routes
from rwkv_batch.errors import ErrorKind
from rwkv_batch.ipc.served_model import ModelCommand, ServedModel

ROUTES = Routes(is_admin=True, answer=EngineList)
_REFUSED = (ErrorKind.INVALID_FIELD,)

_CONNECT_TIMEOUT_S = 30.0
"""Longest time from an engine's ready state to this process's connection."""
_POLL_S = 0.05


class AddBody(Body):
    """An engine to add."""

    devices: list[Device] = Field(
        [], max_length=64, description="Devices of the new engine, in the format of --pp-devices, which is the default."
    )
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds to wait until the engine is ready or failed.")


class EngineBody(Body):
    """The engine to change."""

    engine: str = Field(min_length=1, max_length=64, description="Name of the engine, as listed by /v1/engines.")
    wait_s: float = Field(0, ge=0, le=3600, description="Seconds to wait until the change is done.")


def _engine_entry(engine: ServedModel, lost: list[str]) -> dict[str, object]:
    is_lost = engine.status == "ready" and engine.engine in lost
    return {
        "id": engine.engine, "object": "engine", "created": engine.since, "model": engine.spec.name,
        "status": "lost" if is_lost else engine.status.value, "error": engine.error, "pid": engine.pid,
        "node": engine.node, "devices": list(engine.spec.devices),
    }  # fmt: skip


def _engine_list(context: Context) -> HandlerResponse:
    lost = context.engine.lost
    return json_response(
        {"object": "list", "data": [_engine_entry(engine, lost) for engine in loaded_models(context).engines]}
    )


@ROUTES.add("GET", "/v1/engines", "The engines that serve the model.")
async def engines(context: Context) -> HandlerResponse:
    """List the engines of the service's own model."""
    return _engine_list(context)


async def _change(context: Context, change: ModelCommand, wait_s: float) -> HandlerResponse:
    """Send the command and return the engines after it."""
    await loaded_models(context).change_engines(change, wait_s or None)
    for _ in range(int(_CONNECT_TIMEOUT_S / _POLL_S) if wait_s else 0):
        if not _just_ready(context):
            break
        await asyncio.sleep(_POLL_S)
    return _engine_list(context)


def _just_ready(context: Context) -> bool:
    """Return whether this process must still connect to a newly ready engine."""
    now, lost = time.time(), context.engine.lost
    newly_ready = [
        one for one in loaded_models(context).engines if one.status == "ready" and now - one.since < _CONNECT_TIMEOUT_S
    ]
    return any(one.engine in lost for one in newly_ready)


@ROUTES.add("POST", "/v1/engines/add", "Add an engine.", errors=_REFUSED, example={})
async def add(context: Context, body: AddBody) -> HandlerResponse:
    """Start another engine of the model."""
    devices = tuple(f"cuda:{one}" if one.isdecimal() else one for one in body.devices)
    return await _change(context, ModelCommand(0, add_engine=devices), body.wait_s)


@ROUTES.add("POST", "/v1/engines/remove", "Drain and stop an engine.", errors=_REFUSED, example={"engine": "engine-1"})
async def remove(context: Context, body: EngineBody) -> HandlerResponse:
    """Drain and stop an engine. Its running answers end, or continue on another engine."""
    return await _change(context, ModelCommand(0, remove_engine=body.engine), body.wait_s)


@ROUTES.add(
    "POST",
    "/v1/engines/restart",
    "Drain and restart an engine.",
    errors=_REFUSED,
    example={"engine": "all", "wait_s": 60},
)
async def restart(context: Context, body: EngineBody) -> HandlerResponse:
    """Drain and restart an engine while the others serve. "all" restarts one after the other."""
    return await _change(context, ModelCommand(0, restart_engine=body.engine), body.wait_s)
