"""Routes about the service: health, status, metrics, tokens and the OpenAPI document.

The tokenizer routes are vLLM's. Evaluation harnesses that score token ids call them under the address of the
completions.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.docs.reference import page
from routes.models import model_entry
from routes.openai.formatter import prompt_of
from routes.openai.tools import ChatToolChoice, ChatTools, chat_tool_set
from routes.request import prompts
from routes.request.bodies import Body, Messages, Texts
from routes.request.jobs import BIG_BATCH_LABEL, offload_if_large
from routes.request_context import current_request
from routes.response.generate import call_engine
from routes.response.http_response import NATIVE_ERRORS, OPENAI_ERRORS, HandlerResponse, HttpResponse, json_response
from routes.response.response_models import Detokenized, Health, Status, TokenCount, Tokenized, TokenizerInfo
from routes.route import Route
from rwkv_batch.calls import CountJobs, GetMetrics, GetStatus
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.in_flight_job import ENGINE_GONE
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.tokenizer import END_OF_TEXT, VOCAB_SIZE, Tokenizer

OPENAPI_KEY = "openapi"
"""Key of the OpenAPI document in `Context.shared`."""
_PUBLIC_FIELDS = (
    "model",
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


class CountBody(Body):
    """Text to count."""

    text: str | None = Field(None, description="One text.")
    contents: Texts = Field([], description="Raw prompts.")
    messages: Messages = Field([], description="A conversation, counted in its prompt format.")
    enable_think: bool = Field(False, description="Use the prompt format with thinking.")
    tools: ChatTools = Field([], description="Functions that the prompt of `messages` lists.")
    tool_choice: ChatToolChoice | None = Field(
        None,
        description="As in chat completions. `none` lists no functions. A forced call adds the beginning of a call.",
    )

    @property
    def prompt(self) -> str:
        return prompt_of(
            self.messages,
            prompts.think_mode(self.enable_think),
            chat_tool_set(self.tools, self.tool_choice, parallel_calls=True),
        )

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        chat_tool_set(self.tools, self.tool_choice, parallel_calls=True)
        if self.tools and not self.messages:
            raise PydanticCustomError("tools", "tools can only be given with messages", {"field": "tools"})
        return self


async def healthz(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return ok: this HTTP worker is alive."""
    return json_response({"status": "ok"})


async def readyz(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return 200 if an engine and every HTTP worker take new work, else 503. Names the engines that do not."""
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


async def authz(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return 200 if the header has a valid password or key, or none is required. Proxies check large bodies with it."""
    return json_response({"status": "ok"})


async def status(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return model, devices, samplers, rows, pool and processes, and the models loaded at run time.

    Without admin rights, the answer describes only the model and how it is served.
    """
    status_fields = await call_engine(context, GetStatus())
    if not current_request().is_admin:
        shown = {name: status_fields[name] for name in _PUBLIC_FIELDS if name in status_fields}
        used = {name: {"used": status_fields.get(name, {}).get("used", {})} for name in ("samplers", "kernels")}
        return json_response(shown | used)
    jobs = status_fields["jobs"].get(BIG_BATCH_LABEL, 0)
    others = [] if context.models is None else context.models.registered
    models = await asyncio.gather(*(_model_status(context, model) for model in others))
    return json_response(status_fields | {"big_batch_jobs": jobs, "models": models})


async def _model_status(context: Context, model: ServedModel) -> dict[str, object]:
    """Return the status of a model loaded at run time, with its settings if its engine answers."""
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


async def metrics(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return the metrics of all processes in Prometheus' text format."""
    text = await call_engine(context, GetMetrics())
    jobs = await call_engine(context, CountJobs(BIG_BATCH_LABEL))
    return HttpResponse(
        (text + _LEGACY_METRIC.format(jobs)).encode(), content_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def count_tokens(context: Context, body: CountBody) -> HandlerResponse:
    """Count the tokens of a text, of raw prompts, or of a conversation in its prompt format."""
    if body.messages:
        texts = [body.prompt]
    elif body.contents:
        texts = body.contents
    elif body.text is not None:
        texts = [body.text]
    else:
        raise ServiceError(
            ErrorKind.INVALID_FIELD, "one of text, contents and messages must be given", field="text", given=None
        )
    counts = await offload_if_large(sum(map(len, texts)), _counts, context.tokenizer, texts)
    return json_response({"tokens": sum(counts)})


def _counts(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [len(tokenizer.encode(text)) for text in texts]


async def openapi(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return the OpenAPI document of this API."""
    document: dict[str, Any] = context.shared[OPENAPI_KEY]
    return json_response(document)


_ENGINE_ERRORS = (ErrorKind.ENGINE_LOST,)


END_NAME = "<|rwkv_tokenizer_end_of_text|>"
"""Name of token 0, which has no text, in the transformers package's World tokenizers."""


class TokenizeBody(Body):
    """A text to tokenise."""

    prompt: str = Field(
        description=f"The text. {END_NAME} alone is token 0, the end token. Inside a text it is ordinary text."
    )
    add_special_tokens: bool = Field(True, description="Accepted. There are no special tokens to add.")


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=VOCAB_SIZE)]], Field(fail_fast=True)] = Field(
        description="The token ids."
    )


async def tokenize(context: Context, body: TokenizeBody) -> HandlerResponse:
    """Return the token ids of a text."""
    if body.prompt == END_NAME:
        ids = [END_OF_TEXT]
    else:
        ids = await offload_if_large(len(body.prompt), context.tokenizer.encode, body.prompt)
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": context.config.max_prompt_tokens})


async def detokenize(context: Context, body: DetokenizeBody) -> HandlerResponse:
    """Return the text of token ids. Invalid UTF-8 is shown as U+FFFD."""
    return json_response({"prompt": context.tokenizer.decode_bytes(body.tokens).decode("utf-8", "replace")})


async def tokenizer_info(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return the tokenizer's class, vocabulary size and special tokens."""
    info = {"tokenizer_class": "RWKVWorldTokenizer", "vocab_size": VOCAB_SIZE}
    return json_response({**info, "bos_token": END_NAME, "eos_token": END_NAME})


def _tokenizer_routes(prefix: str) -> tuple[Route, ...]:
    """Return the three routes under `prefix`, where clients of `{prefix}/v1/completions` expect them."""
    error_format = OPENAI_ERRORS if prefix else NATIVE_ERRORS
    return (
        Route(
            "POST",
            f"{prefix}/tokenize",
            tokenize,
            TokenizeBody,
            "Token ids of a text.",
            answer=Tokenized,
            error_format=error_format,
            example={"prompt": "Hello world!"},
        ),
        Route(
            "POST",
            f"{prefix}/detokenize",
            detokenize,
            DetokenizeBody,
            "The text of token ids.",
            answer=Detokenized,
            error_format=error_format,
            example={"tokens": [33155, 40213, 34]},
        ),
        Route(
            "GET",
            f"{prefix}/tokenizer_info",
            tokenizer_info,
            None,
            "About the tokenizer.",
            answer=TokenizerInfo,
            error_format=error_format,
        ),
    )


async def docs(context: Context, query: dict[str, str]) -> HandlerResponse:
    """Return every route with its fields, limits, errors and a curl command."""
    content = page(context.shared[OPENAPI_KEY]).encode()
    return HttpResponse(content, content_type="text/html; charset=utf-8")


ROUTES = (
    Route("GET", "/healthz", healthz, None, "Whether the worker is alive.", answer=Health, is_public=True),
    Route(
        "GET",
        "/readyz",
        readyz,
        None,
        "Whether the service takes work. 503 otherwise.",
        answer=Health,
        is_public=True,
        errors=_ENGINE_ERRORS,
    ),
    Route(
        "GET",
        "/health",
        readyz,
        None,
        "Same as /readyz, under the name of vLLM, SGLang and llama.cpp.",
        answer=Health,
        is_public=True,
        errors=_ENGINE_ERRORS,
    ),
    Route("GET", "/authz", authz, None, "Whether the Authorization header has a valid secret.", answer=Health),
    Route(
        "GET",
        "/status",
        status,
        None,
        "Model, devices, samplers, rows, pool, processes.",
        answer=Status,
        errors=_ENGINE_ERRORS,
    ),
    Route(
        "GET",
        "/metrics",
        metrics,
        None,
        "Metrics for Prometheus.",
        content_type="text/plain",
        errors=_ENGINE_ERRORS,
        is_admin=True,
    ),
    Route(
        "POST",
        "/v1/tokens/count",
        count_tokens,
        CountBody,
        "Count tokens.",
        answer=TokenCount,
        example={"text": "Hello world!"},
    ),
    Route("GET", "/openapi.json", openapi, None, "The OpenAPI document."),
    *_tokenizer_routes(""),
    *_tokenizer_routes("/openai"),
    Route("GET", "/docs", docs, None, "This reference as a web page.", is_public=True, content_type="text/html"),
)
