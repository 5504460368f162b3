"""llama.cpp's routes: raw completions, fill in the middle, properties and slots.

Its other routes are those of OpenAI's API, and `/tokenize`, `/detokenize` and `/apply-template`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from routes.context import Context
from routes.openai.completion_models import ChosenToken
from routes.openai.formatter import logprob_entries, openai_rows
from routes.openai.request import MAX_BIASES, MAX_TOP_LOGPROBS, RawBody, TokenId
from routes.request import prompts
from routes.request.bodies import Body, SamplingBody, StopText
from routes.request.fields import IgnoredValue, Repeated, Unsupported, rename_fields
from routes.request.jobs import encode, make_job, offload_if_large, row_stops
from routes.request.json_body import validate
from routes.request.sampler_fields import SamplerFields
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import ResponseFormatter, call_engine, run
from routes.response.http_response import (
    OPENAI_ERRORS,
    SSE,
    ErrorFormat,
    HandlerResponse,
    StreamFormat,
    json_response,
    sse,
    with_warnings,
)
from routes.response.response_models import WithWarnings
from routes.route import Routes, with_defaults_applied
from rwkv_batch.calls import GetStatus
from rwkv_batch.errors import ErrorKind
from rwkv_batch.request import Finish, FinishReason, TokenLogprob
from rwkv_batch.version import __version__

ROUTES = Routes()

LLAMA_ERRORS = ErrorFormat(
    OPENAI_ERRORS.body, OPENAI_ERRORS.statuses, OPENAI_ERRORS.schema, StreamFormat(SSE, sse, end=b"")
)
_RENAMED = {"max_tokens": "n_predict", "logprobs": "n_probs", "logit_bias": "logit_bias"}
"""Fields of the OpenAI routes in errors -> the request's."""
_SAME = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos", "json_schema", "stop")
_TEMPLATE_TEXT = "{{ messages }}: `System: …`, `User: …` and `Assistant: …`, separated by blank lines"


def _as_pairs(value: Any) -> Any:
    """Return llama.cpp's other form, an object, as pairs. Its keys are ids or texts."""
    if not isinstance(value, dict):
        return value
    return [[int(key) if key.isdecimal() and len(key) < 10 else key, bias] for key, bias in value.items()]


def _check_pair(pair: list[Any]) -> list[Any]:
    token, bias = pair
    if isinstance(token, float | bool) or isinstance(bias, str):
        raise PydanticCustomError("bias", "must be a token id or a text, then a number or false")
    if isinstance(token, int) and token < 0:
        raise PydanticCustomError("bias", "has a negative token id; give an id, or a text")
    if isinstance(token, str) and token.isdecimal():
        raise PydanticCustomError("bias", "has a text of digits alone; give the token ids as numbers")
    return pair


Bias = Annotated[
    list[int | float | bool | Annotated[str, Field(min_length=1, max_length=64)]],
    Field(min_length=2, max_length=2),
    AfterValidator(_check_pair),
]
"""Token id or text, and bias."""


class LlamaRaw(RawBody):
    """A raw prompt from llama.cpp's API."""


class LlamaFields(SamplerFields, Body):
    """Fields of `/completion` and `/infill`. The defaults are those of the service."""

    model: str = Field("rwkv7", max_length=256, description="As on the other routes.")
    stream: bool = Field(False, description="Answer with server-sent events. The last one has `stop`: true.")
    n_predict: int | None = Field(
        None, ge=-2, description="Maximum number of generated tokens. Below 0: the default, 8192."
    )
    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature. 0 is greedy.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off.")
    top_p: float | None = Field(None, ge=0, le=1, description="1 turns it off.")
    seed: int | None = Field(None, ge=-1, lt=2**64, description="-1: a new one.")
    stop: Annotated[list[StopText], Field(max_length=64, fail_fast=True)] = Field(
        [], description="Texts that end the answer."
    )
    presence_penalty: float | None = Field(None, ge=-100, le=100, description="Presence penalty.")
    frequency_penalty: float | None = Field(None, ge=-100, le=100, description="Frequency penalty.")
    ignore_eos: bool = Field(False, description="Continue after the end-of-text token.")
    json_schema: dict[str, Any] | None = Field(None, description="The text is JSON that is valid under this schema.")
    grammar: Unsupported = Field(None, description="GBNF; refused. Use `json_schema`, or `grammar` of other routes.")
    logit_bias: Annotated[list[Bias], Field(max_length=MAX_BIASES, fail_fast=True), BeforeValidator(_as_pairs)] = Field(
        [], description="[[token id or text, bias], …], or an object of these. false bans, also a text's tokens."
    )
    n_probs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description="Return log-probabilities of each token and of n alternatives."
    )
    return_tokens: bool = Field(False, description="Return the token ids of the text.")
    cache_prompt: Repeated = Field(None, description="Accepted: every prefix may be cached.")
    id_slot: Repeated = Field(None, description="Accepted: the service chooses the slot.")
    timings_per_token: Repeated = Field(None, description="Accepted: the last event has `timings`.")
    t_max_predict_ms: IgnoredValue = Field(None, description="Accepted and ignored.")
    response_fields: Repeated = Field(None, description="Accepted: the answer has all fields.")

    def raw(self, prompt: str | list[int]) -> LlamaRaw:
        """Return the request in OpenAI's format. Raises ServiceError."""
        given = {name: getattr(self, name) for name in _SAME} | self.given_samplers(repeat_last_n=64)
        if self.n_predict is not None and self.n_predict >= 0:
            given["max_tokens"] = self.n_predict
        if self.seed is not None and self.seed >= 0:
            given["seed"] = self.seed
        biases = ((str(token), -100.0 if one is False else float(one)) for token, one in self.logit_bias)
        bias = {token: max(-100.0, min(one, 100.0)) for token, one in biases}
        fields = {"model": self.model, "prompt": prompt, "stream": self.stream, "logit_bias": bias, **given}
        with rename_fields(**_RENAMED):
            return validate(LlamaRaw, {**fields, "logprobs": self.n_probs or (0 if self.return_tokens else None)})


MixedPrompt = Annotated[list[TokenId | str], Field(fail_fast=True)]


class CompletionPrompt(LlamaFields):
    """A raw prompt to continue."""

    prompt: str | MixedPrompt | Annotated[list[str | MixedPrompt], Field(min_length=1, fail_fast=True)] = Field(
        description="A text, or a list of token ids and texts that are joined. Or a list of these prompts: texts alone "
        "are a prompt each. Two prompts and more have a list of answers."
    )

    def prompts(self) -> list[str | list[int | str]]:
        """Return the prompts as given. A list with a token id is one prompt."""
        is_one = isinstance(self.prompt, str) or not self.prompt or any(isinstance(one, int) for one in self.prompt)
        return cast(list[str | list[int | str]], [self.prompt] if is_one else self.prompt)

    def encoded(self, encode: Callable[[str], list[int]]) -> list[str | list[int]]:
        """Return texts, and token ids of lists."""
        return [
            one
            if isinstance(one, str)
            else [i for part in one for i in (encode(part) if isinstance(part, str) else [part])]
            for one in self.prompts()
        ]


class InfillPrompt(LlamaFields):
    """Text with a gap."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    prompt: str = Field("", description="Text after `input_prefix`.")
    input_extra: IgnoredValue = Field(None, description="Accepted and ignored: other files.")


class Completion(WithWarnings):
    """Continued text: new output of a stream, or the whole answer."""

    index: int = Field(description="The prompt's position in the request.")
    content: str
    tokens: list[int] = Field(description="Ids of the new tokens, with `return_tokens`.")
    id_slot: int = Field(description="Always -1.")
    stop: bool = Field(description="Whether the answer is complete. If so, it has the fields below, from `model` on.")
    tokens_predicted: int = Field(description="Generated tokens so far, including a stop token.")
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    completion_probabilities: list[ChosenToken] = Field(
        [], description="Log-probabilities of new tokens, with `n_probs`."
    )
    model: str = Field("", description="As in the request.")
    prompt: str | list[int] = Field("", description="The prompt.")
    stop_type: Literal["eos", "word", "limit"] | None = Field(None, description="word: an entry of `stop`.")
    stopping_word: str = Field("", description="The entry of `stop` that ended the text.")
    truncated: bool = Field(False, description="Always false.")
    tokens_cached: int = Field(0, description="Tokens of the prompt from a cached prefix.")
    timings: dict[str, float] = Field({}, description="Counts, milliseconds and speeds of prompt and answer.")


class Props(BaseModel):
    """Properties of the model and its defaults."""

    default_generation_settings: dict[str, Any]
    total_slots: int = Field(description="Rows that may run at the same time.")
    model_path: str = Field(description="The model's name.")
    chat_template: str = Field(description="A description of the prompt format. See /apply-template.")
    modalities: dict[str, bool]
    build_info: str


class LlamaFormatter(ResponseFormatter):
    """Writes one row per prompt."""

    error_format = LLAMA_ERRORS

    def __init__(
        self, body: LlamaFields, prompts: list[str | list[int]], prompt_tokens: list[int], ids: Mapping[bytes, int]
    ) -> None:
        """prompt_tokens: number of tokens of each prompt; ids: of the tokens' bytes"""
        self._model, self._prompts, self._prompt_tokens = body.model, prompts, prompt_tokens
        self._returns_probs, self._ids = body.n_probs > 0, ids if body.return_tokens else None
        self._started = time.monotonic()
        self._first = [self._started] * len(prompts)
        self._num_tokens = [0] * len(prompts)

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        events = []
        for update in updates:
            row = update.row
            if not self._num_tokens[row]:
                self._first[row] = time.monotonic()
            self._num_tokens[row] += update.num_tokens
            if update.text or update.logprobs:
                events.append(self._part(row, update.text, update.logprobs))
            if update.finish is not None and update.finish.error is None:
                events.append({**self._part(row, "", []), **self._end(row, update.finish)})
        return b"".join(sse(self.first_with_warnings(event)) for event in events)

    def full_body(self, rows: list[DecodedRow]) -> Any:
        bodies = [
            {**self._part(i, row.text, row.logprobs), **({} if row.finish is None else self._end(i, row.finish))}
            for i, row in enumerate(rows)
        ]
        return bodies[0] if len(bodies) == 1 else [with_warnings(bodies[0]), *bodies[1:]]

    def _part(self, row: int, text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        counts = {"tokens_predicted": self._num_tokens[row], "tokens_evaluated": self._prompt_tokens[row]}
        tokens = [] if self._ids is None else [self._ids[one.token] for one in logprobs if one.token in self._ids]
        part = {"index": row, "content": text, "tokens": tokens, "id_slot": -1, "stop": False, **counts}
        return part | ({"completion_probabilities": logprob_entries(logprobs)} if self._returns_probs else {})

    def _end(self, row: int, finish: Finish) -> dict[str, Any]:
        word = finish.stop_string.decode()
        kind = "word" if word else "eos" if finish.reason == FinishReason.STOP else "limit"
        prompt_s, predicted_s = self._first[row] - self._started, time.monotonic() - self._first[row]
        return {
            "stop": True,
            "model": self._model,
            "prompt": self._prompts[row],
            "stop_type": kind,
            "stopping_word": word,
            "truncated": False,
            "tokens_predicted": finish.completion_tokens,
            "tokens_evaluated": finish.prompt_tokens,
            "tokens_cached": finish.cached_tokens,
            "timings": {
                "cache_n": finish.cached_tokens,
                **_timings("prompt", finish.prompt_tokens - finish.cached_tokens, prompt_s),
                **_timings("predicted", finish.completion_tokens, predicted_s),
            },
        }


def _timings(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(tokens, 1),
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


_GENERATION: dict[str, Any] = {
    "is_generation": True,
    "answer": Completion,
    "events": (Completion,),
    "error_format": LLAMA_ERRORS,
}


async def _complete(
    context: Context, body: LlamaFields, prompts: list[str | list[int]], stops: tuple[str, ...], path: str, field: str
) -> HandlerResponse:
    raw: LlamaRaw = await with_defaults_applied(context, await offload_if_large(len(prompts[0]), body.raw, prompts[0]))
    with rename_fields(**_RENAMED):
        rows = await openai_rows(context, raw, prompts, row_stops(raw, built_in=stops), field)
    formatter = LlamaFormatter(body, prompts, [len(row.prompt) for row in rows], context.tokenizer.id_by_bytes)
    return await run(context, make_job(rows, raw, path), formatter, OutputDecoder(len(rows)), body.stream)


@ROUTES.add(
    "POST", "/completion", "llama.cpp: continue a prompt.", example={"prompt": "Once", "n_predict": 32}, **_GENERATION
)
async def completion(context: Context, body: CompletionPrompt) -> HandlerResponse:
    """Continue raw prompts in llama.cpp's format."""

    def encode_part(part: str) -> list[int]:
        return encode(context.tokenizer, part, "prompt", context.config) if part else []

    characters = sum(
        len(part) for one in body.prompts() if not isinstance(one, str) for part in one if isinstance(part, str)
    )
    given = await offload_if_large(characters, body.encoded, encode_part)
    return await _complete(context, body, given, (), "/completion", "prompt")


@ROUTES.add(
    "POST",
    "/infill",
    "llama.cpp: fill in the middle.",
    example={"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))", "n_predict": 32},
    **_GENERATION,
)
async def infill(context: Context, body: InfillPrompt) -> HandlerResponse:
    """Fill in the middle in llama.cpp's format."""
    prompt = prompts.fill_in_the_middle(body.input_prefix + body.prompt, body.input_suffix)
    return await _complete(context, body, [prompt], (prompts.FIM_STOP,), "/infill", "input_prefix")


@ROUTES.add("GET", "/props", "llama.cpp: the model and its defaults.", answer=Props, errors=(ErrorKind.ENGINE_LOST,))
async def props(context: Context) -> HandlerResponse:
    """Return the model's properties and the default sampling parameters."""
    status = await call_engine(context, GetStatus())
    defaults = {name: field.default for name, field in SamplingBody.model_fields.items()} | context.defaults.given
    names = ("temperature", "top_k", "top_p", "alpha_presence", "alpha_frequency", "alpha_decay")
    params = {**{name: defaults[name] for name in names}, "n_predict": defaults["max_tokens"], "stop": []}
    return json_response(
        {
            "default_generation_settings": {"n_ctx": context.config.max_prompt_tokens, "params": params},
            "total_slots": status.get("max_running", 1),
            "model_path": context.config.model_name,
            "chat_template": _TEMPLATE_TEXT,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"rwkv-batch {__version__}",
        }
    )


@ROUTES.add("GET", "/slots", "llama.cpp: the running slots.", is_admin=True, errors=(ErrorKind.ENGINE_LOST,))
async def slots(context: Context) -> HandlerResponse:
    """Return the running slots. Which request runs in which slot is not shown."""
    status = await call_engine(context, GetStatus())
    running = status["running_rows"]
    n_ctx = context.config.max_prompt_tokens
    count = max(running, status.get("max_running", 1))
    return json_response([{"id": i, "n_ctx": n_ctx, "is_processing": i < running} for i in range(count)])
