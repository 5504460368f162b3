"""Sampling parameters with vLLM's names, and the error of a call.

Also the request fields that the parameters become.
"""

from __future__ import annotations

from typing import Any

import msgspec

from programs.library.arguments import library_message
from routes.openai.request import ChatBody, CompletionBody, OpenAIBody
from routes.request.json_body import validate
from routes.response.http_response import HTTP_STATUS
from rwkv_batch.errors import ErrorInfo, ServiceError


class LLMError(Exception):
    """A call failed. The message names the value given, the limit and the remedy, with arguments for flags."""

    def __init__(self, message: str, *, status: int = 500, field: str | None = None, given: Any = None) -> None:
        """`status`: HTTP status. `field`: the faulty argument, or None. `given`: its value."""
        super().__init__(library_message(message))
        self.status = status
        self.field = field
        self.given = given


def as_llm_error(error: ServiceError | ErrorInfo) -> LLMError:
    """Converts an engine's or request's error."""
    info = error.info if isinstance(error, ServiceError) else error
    return LLMError(info.message, status=HTTP_STATUS[info.kind], field=info.field, given=info.given)


_SEEDS = 2**64
_CONVERTED = {"top_k", "presence_penalty", "frequency_penalty", "seed", "stop_token_ids", "logit_bias", "logprobs"}
"""Parameters with another form than the routes' fields of these names."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters; names and defaults are vLLM's.

    The fields after `extra_args` are this engine's. Limits are those of the routes.
    """

    n: int = 1
    """Answers per prompt. They share its prefill."""
    max_tokens: int = 16
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Answer k to prompt i uses seed + i * n + k."""
    stop: str | list[str] = []
    stop_token_ids: list[int] | None = None
    """None: no stop tokens for prompts, those of the prompt template for conversations."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Return `token_ids` with log-probabilities, and this number of alternatives for each."""
    prompt_logprobs: int | None = None
    """Return the prompt's log-probabilities, with this number of alternatives. Not for streams and sessions."""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit; -100 bans the token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] = {}
    """Other fields of the routes, like `{"xtc_probability": 0.5}`."""
    penalty_decay: float = 1.0
    """Factor applied to the penalties' token counts after each token."""
    pad_zero: bool = False
    """Put token 0 before the prompt."""
    state: str | None = None
    """Name of the tuned state (`states=` of LLM) before the prompt."""
    adapter: str | None = None
    """Name of the adapter (`served_adapters=` of LLM) for prompt and answer."""
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    timeout_s: float | None = None


def merge_params(params: SamplingParams | None, given: dict[str, Any]) -> SamplingParams:
    """Return the given parameters. Raises TypeError for both forms at once, and for an unknown name."""
    if params is None:
        return SamplingParams(**given)
    if given:
        raise TypeError(f"give SamplingParams or {', '.join(given)}, not both")
    return params


def _fields(params: SamplingParams, first: int, streams: bool, body: type[OpenAIBody]) -> dict[str, Any]:
    """Return the fields of both bodies. Raises TypeError for an unknown one in `extra_args`."""
    if unknown := params.extra_args.keys() - body.model_fields.keys():
        raise TypeError(f"extra_args: {', '.join(sorted(unknown))} are no fields of a request; remove them")
    same = [name for name in SamplingParams.__struct_fields__ if name in body.model_fields and name not in _CONVERTED]
    fields: dict[str, Any] = {
        **{name: getattr(params, name) for name in same if name != "pad_zero" or params.pad_zero},
        "top_k": max(params.top_k, 0),
        "alpha_presence": params.presence_penalty,
        "alpha_frequency": params.frequency_penalty,
        "alpha_decay": params.penalty_decay,
        "seed": None if params.seed is None else (params.seed + first * params.n) % _SEEDS,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "stream": streams,
        "chunk_size": 1,
        **params.extra_args,
    }
    if params.stop_token_ids is not None:
        fields["stop_tokens"] = params.stop_token_ids
    return fields


def completion_body(
    prompts: list[Any], params: SamplingParams, first: int, session_id: str | None, streams: bool
) -> CompletionBody:
    """Return the body for prompts; `first` is the index of the first one. Raises ServiceError."""
    own = {"prompt": prompts, "logprobs": params.logprobs, "session_id": session_id}
    body: CompletionBody = validate(CompletionBody, _fields(params, first, streams, CompletionBody) | own)
    return body


def chat_body(
    messages: list[Any], params: SamplingParams, first: int, session_id: str | None, streams: bool, **more: Any
) -> ChatBody:
    """Return the body for conversation number `first` of a call. Raises ServiceError."""
    logprobs = {"logprobs": params.logprobs is not None, "top_logprobs": params.logprobs}
    own = {"messages": messages, "session_id": session_id, **logprobs, **more}
    body: ChatBody = validate(ChatBody, _fields(params, first, streams, ChatBody) | own)
    return body
