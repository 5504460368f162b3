"""Turns prompts into engine rows with the routes' functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from programs.library.outputs import State
from programs.library.params import SamplingParams, chat_body, completion_body
from routes.context import Context
from routes.openai.formatter import conversation_rows, openai_rows, with_prompt_logprobs
from routes.request.jobs import as_turn, row_stops
from routes.response.answer_parser import AnswerFormat
from rwkv_batch.request import GenerateRequest

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's forms {"prompt": ...} and {"prompt_token_ids": [...]}."""
Message = Mapping[str, Any]
"""OpenAI's form: {"role": "user", "content": "..."}."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a call."""

    row: GenerateRequest
    prompt: str | None
    form: AnswerFormat | None = None
    """Format of a conversation's answer."""
    source: State | None = None
    """State before the prompt."""


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """Options of all prompts of a call."""

    params: SamplingParams
    streams: bool = False
    session_id: str | None = None
    source: State | None = None
    think: bool = False


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Returns one or several prompts as a list. Raises TypeError or ValueError."""
    given: Any = prompts if isinstance(prompts, str | Mapping) else list(prompts)
    is_one = isinstance(given, str | Mapping) or (given and all(isinstance(one, int) for one in given))
    return [_as_prompt(one) for one in ([given] if is_one else given)]


def _as_prompt(prompt: Any) -> str | list[int]:
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(given, str | list):
        raise TypeError(f"a prompt must be a text or a list of token ids, got {type(given).__name__}")
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a prompt has a lone surrogate at character {error.start}, which is not valid text"
            ) from None
    return given


def as_texts(texts: str | Sequence[str]) -> list[str]:
    """Returns one or several texts as a list."""
    return [texts] if isinstance(texts, str) else list(texts)


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """Returns one or several conversations as a list."""
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


async def requests_from_prompts(
    context: Context, prompts: Sequence[str | list[int]], first: int, generate_input: GenerateInput
) -> list[PromptRequest]:
    """Builds the requests of prompts from index `first` on. Raises ServiceError."""
    texts = list(prompts)
    body = completion_body(texts, generate_input.params, first, generate_input.session_id, generate_input.streams)
    stops = row_stops(body)
    rows = await openai_rows(context, body, texts, stops, "prompts")
    rows = with_prompt_logprobs(rows, body.prompt_logprobs)
    if generate_input.session_id is not None:
        rows = await as_turn(context, rows, texts[0], generate_input.session_id, texts[0], "prompts")
    source = None
    if generate_input.source is not None:
        (row,) = rows
        source = await generate_input.source.fork(context)
        rows = [msgspec.structs.replace(row, session=source.turn(row.prompt))]
    pairs = zip(rows, texts, strict=True)
    return [PromptRequest(row, text if isinstance(text, str) else None, source=source) for row, text in pairs]


async def requests_from_conversations(
    context: Context, conversations: Sequence[list[Message]], first: int, generate_input: GenerateInput
) -> list[PromptRequest]:
    """Builds the requests of conversations from index `first` on. Raises ServiceError."""
    found = []
    for number, messages in enumerate(conversations, first):
        body = chat_body(
            messages,
            generate_input.params,
            number,
            generate_input.session_id,
            generate_input.streams,
            enable_think=generate_input.think,
        )
        (row,) = with_prompt_logprobs(await conversation_rows(context, body, "messages"), body.prompt_logprobs)
        found.append(
            PromptRequest(
                row, context.tokenizer.decode_bytes(row.prompt).decode("utf-8", "replace"), body.answer_format
            )
        )
    return found
