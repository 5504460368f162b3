"""Routes about the service: health, status, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from routes.context import Context
from routes.docs.reference import page
from routes.models import model_entry
from routes.request.jobs import BIG_BATCH_LABEL
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import HandlerResponse, HttpResponse, json_response
from routes.response.response_models import Health, Status, Version
from routes.route import Routes
from rwkv_batch.calls import CountJobs, GetMetrics, GetStatus, ListRequests
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.version import __version__

_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST,)
_READINESS: dict[str, Any] = {"answer": Health, "is_public": True, "errors": _ENGINE_ERRORS}
ROUTES = Routes()

OPENAPI_KEY = "openapi"
"""Key of the function in `Context.shared` that returns the OpenAPI document. The first call takes 0.2 s."""
_PUBLIC_FIELDS = (
    "model",
    "model_file",
    "model_version",
    "model_shape",
    "parameters",
    "fingerprint",
    "devices",
    "dtype",
    "wkv_state",
    "max_running",
)
"""Fields of the status for everyone. Others have names, counts or paths of other clients and the machine."""
_SERVING_FIELDS = ("dtype", "wkv_state", "kernels", "devices")
"""Fields of a model's status that describe how it is served."""
_STATUS_TIMEOUT_S = 2.0
"""Time limit for the status of another model's engine, which may hang."""
_LEGACY_METRIC = """\
# HELP rwkv_big_batch_jobs The older name of rwkv_jobs{{label="big_batch"}}.
# TYPE rwkv_big_batch_jobs gauge
rwkv_big_batch_jobs {}
"""


class RequestEntry(BaseModel):
    """A finished request in the access log."""

    model_config = ConfigDict(extra="allow")

    at: float = Field(description="Unix time in seconds of its end.")
    request_id: str
    client: str = Field(description="Name of the API key, else the address.")
    method: str
    route: str
    status: int
    outcome: str = Field(description="`done`, `client_left` or the kind of the error.")
    total_s: float
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = Field(None, description="Seconds to the first byte of a stream.")
    refused: dict[str, Any] | None = Field(None, description="Field and message of the error.")


class RecentRequests(BaseModel):
    """The last requests, newest first."""

    logged: bool = Field(description="False with --access-log 0: nothing is listed.")
    requests: list[RequestEntry]


@ROUTES.add("GET", "/healthz", "Whether the worker is alive.", answer=Health, is_public=True)
async def healthz(context: Context) -> HandlerResponse:
    """Return ok: this HTTP worker is alive."""
    return json_response({"status": "ok"})


@ROUTES.add("GET", "/ping", "Same as /readyz, under vLLM's name.", **_READINESS)
@ROUTES.add("GET", "/health", "Same as /readyz, under the name of vLLM, SGLang and llama.cpp.", **_READINESS)
@ROUTES.add("GET", "/readyz", "Whether the service takes work. 503 otherwise.", **_READINESS)
async def readyz(context: Context) -> HandlerResponse:
    """Return 200 if the service takes new work, else 503.

    An engine and every HTTP worker must take new work. Names the engines that take none.
    """
    unavailable_reason = None
    if context.limiter.draining:
        unavailable_reason = "draining"
    elif not context.engine.is_connected:
        unavailable_reason = "the engine is not running (loading the model, or restarting)"
    elif not context.readiness.all_workers_ready:
        unavailable_reason = "not every HTTP worker takes work yet (starting, or being replaced)"
    if unavailable_reason is not None:
        return json_response({"status": unavailable_reason, "error": unavailable_reason}, 503)
    lost = context.engine.lost
    return json_response({"status": "degraded", "lost": lost} if lost else {"status": "ready"})


@ROUTES.add("GET", "/authz", "Whether the Authorization header has a valid secret.", answer=Health)
async def authz(context: Context) -> HandlerResponse:
    """Return 200 if the header has a valid password or key.

    Also returns 200 if none is required. Proxies check large bodies with this route.
    """
    return json_response({"status": "ok"})


@ROUTES.add("GET", "/status", "Model, devices, samplers, rows, pool, processes.", answer=Status, errors=_ENGINE_ERRORS)
async def status(context: Context) -> HandlerResponse:
    """Return model, devices, samplers, rows, pool and processes.

    Also returns the models loaded at run time and the limits of the API keys. Without admin rights, the answer
    describes only the model and how it is served.
    """
    status_fields = await call_engine(context, GetStatus())
    if not current_request().is_admin:
        shown = {name: status_fields[name] for name in _PUBLIC_FIELDS if name in status_fields}
        used = {name: {"used": status_fields.get(name, {}).get("used", {})} for name in ("samplers", "kernels")}
        return json_response(shown | used)
    jobs = status_fields["jobs"].get(BIG_BATCH_LABEL, 0)
    others = [] if context.models is None else context.models.registered
    models = await asyncio.gather(*(_model_status(context, model) for model in others))
    return json_response(status_fields | {"big_batch_jobs": jobs, "models": models, "keys": context.keys.listed()})


async def _model_status(context: Context, model: ServedModel) -> dict[str, object]:
    """Return the status of a model loaded at run time. It has the model's settings if its engine answers."""
    served = context.models.ready_context(model) if context.models is not None else None
    if served is None or not served.engine.is_connected:
        return model_entry(model)
    try:
        status_fields = await asyncio.wait_for(call_engine(served, GetStatus()), _STATUS_TIMEOUT_S)
    except TimeoutError:
        return model_entry(model)
    except ServiceError as error:  # it was lost or unloaded in the meantime
        if error.info.kind not in ENGINE_GONE:
            raise
        return model_entry(model)
    return model_entry(model) | {name: status_fields[name] for name in _SERVING_FIELDS if name in status_fields}


@ROUTES.add(
    "GET", "/metrics", "Metrics for Prometheus.", content_type="text/plain", errors=_ENGINE_ERRORS, is_admin=True
)
async def metrics(context: Context) -> HandlerResponse:
    """Return the metrics of all processes in Prometheus' text format."""
    text = await call_engine(context, GetMetrics())
    jobs = await call_engine(context, CountJobs(BIG_BATCH_LABEL))
    return HttpResponse(
        (text + _LEGACY_METRIC.format(jobs)).encode(), content_type="text/plain; version=0.0.4; charset=utf-8"
    )


@ROUTES.add(
    "GET",
    "/v1/requests",
    "The last 500 requests of the access log.",
    answer=RecentRequests,
    errors=_ENGINE_ERRORS,
    is_admin=True,
)
async def requests(context: Context) -> HandlerResponse:
    """Return the access log's last requests, newest first. Successful reads are left out."""
    return json_response({"logged": context.config.access_log, "requests": await call_engine(context, ListRequests())})


@ROUTES.add("GET", "/openapi.json", "The OpenAPI document.")
async def openapi(context: Context) -> HandlerResponse:
    """Return the OpenAPI document of this API."""
    return json_response(await asyncio.to_thread(context.shared[OPENAPI_KEY]))  # streams continue while it is built


@ROUTES.add("GET", "/version", "The version of the service, under vLLM's name.", answer=Version)
async def version(context: Context) -> HandlerResponse:
    """Return the version of the service."""
    return json_response({"version": __version__})


@ROUTES.add("GET", "/docs", "This reference as a web page.", is_public=True, content_type="text/html")
async def docs(context: Context) -> HandlerResponse:
    """Return every route with its fields, limits, errors and a curl command."""
    content = await asyncio.to_thread(page, context.shared[OPENAPI_KEY])
    return HttpResponse(content.encode(), content_type="text/html; charset=utf-8")
