"""`/api/chat` and `/api/generate`: answers as one JSON object per line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from routes.context import Context
from routes.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer
from routes.ollama.request import RENAMED, OllamaBody, OllamaChat, OllamaChatBody, OllamaGenerateBody, OllamaRaw
from routes.openai.formatter import conversation_rows, logprob_entries, openai_rows
from routes.openai.logprobs import ContentLogprobs
from routes.request import prompts
from routes.request.fields import rename_fields
from routes.request.jobs import encode, make_job, offload_if_large, row_stops
from routes.response.answer_parser import AnswerDelta, AnswerFormat, AnswerParser
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import ResponseFormatter, run
from routes.response.http_response import (
    NATIVE_ERRORS,
    NDJSON_STREAM,
    OPENAI_STATUS,
    ErrorFormat,
    HandlerResponse,
    json_line,
    json_response,
    timestamp,
)
from routes.response.tool_call_parser import DeltaToolCall
from routes.route import Routes, with_defaults_applied
from rwkv_batch.request import Finish, GenerateRequest, TokenLogprob

OLLAMA_ERRORS = ErrorFormat(NATIVE_ERRORS.body, OPENAI_STATUS, NATIVE_ERRORS.schema, NDJSON_STREAM)
CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
ROUTES = Routes(is_generation=True, needs_known_model=True, error_format=OLLAMA_ERRORS)
_RAW_FORMAT = AnswerFormat(is_constrained=True)
"""Format of a raw answer: all of it is content."""
MakeFields = Callable[[str, dict[str, Any]], dict[str, Any]]


def message_fields(content: str, others: dict[str, Any]) -> dict[str, Any]:
    """Return new text, reasoning and tool calls as fields of /api/chat."""
    return {"message": {"role": "assistant", "content": content, **others}}


def response_fields(content: str, others: dict[str, Any]) -> dict[str, Any]:
    """Return new text and reasoning as fields of /api/generate."""
    return {"response": content, **others}


class CallCollector:
    """Joins the deltas of tool calls: Ollama's format has complete calls only."""

    def __init__(self) -> None:
        self._name = ""
        self._arguments: list[str] = []

    def feed(self, deltas: list[DeltaToolCall], final: bool) -> list[dict[str, Any]]:
        """Return the calls that are complete. One that was cut off is dropped."""
        calls = []
        for delta in deltas:
            if delta.name:
                calls += self._complete()
                self._name = delta.name
            self._arguments.append(delta.arguments)
        return [*calls, *(self._complete() if final else [])]

    def _complete(self) -> list[dict[str, Any]]:
        name, text = self._name, "".join(self._arguments) or "{}"
        self._name, self._arguments = "", []
        try:
            return [{"function": {"name": name, "arguments": json.loads(text)}}] if name else []
        except ValueError:
            return []


class OllamaFormatter(ResponseFormatter):
    """Writes the lines of one row."""

    error_format = OLLAMA_ERRORS
    begins_with_output = True

    def __init__(
        self,
        body: OllamaBody,
        answer_format: AnswerFormat,
        make_fields: MakeFields,
        context: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Create the formatter of one answer.

        make_fields: returns the fields of new output, from its text and its other fields
        context: returns the tokens of the conversation with the answer's text
        """
        self._model, self._make_fields, self._context = body.model, make_fields, context
        self._returns_logprobs = body.logprobs
        self._parser = AnswerParser(answer_format)
        self._calls = CallCollector()
        self._logprobs = ContentLogprobs()
        self._text: list[str] = []
        self._started = time.monotonic_ns()

    def chunk(self, updates: list[DecodedRow]) -> bytes:
        lines = []
        for update in updates:
            finish = update.finish
            output = self._output(update.text, update.logprobs, finish is not None)
            if output is not None:
                lines.append(self._line(output))
            if finish is not None and finish.error is None:
                lines.append(self._line(self._make_fields("", {}), finish))
        return b"".join(json_line(self.first_with_warnings(line)) for line in lines)

    def full_body(self, rows: list[DecodedRow]) -> Any:
        (row,) = rows
        return self._line(self._output(row.text, row.logprobs, True) or self._make_fields("", {}), row.finish)

    def _output(self, text: str, logprobs: list[TokenLogprob], final: bool) -> dict[str, Any] | None:
        """Return the fields of new output, or None."""
        if self._context is not None:
            self._text.append(text)
        parts: AnswerDelta = self._parser.feed(text, final)
        others: dict[str, Any] = {"thinking": parts.reasoning} if parts.reasoning else {}
        if calls := self._calls.feed(parts.calls, final):
            others["tool_calls"] = calls
        tokens = logprob_entries(self._logprobs.feed(logprobs, parts, final)) if self._returns_logprobs else []
        if not (parts.content or others or tokens):
            return None
        return self._make_fields(parts.content, others) | ({"logprobs": tokens} if tokens else {})

    def _line(self, output: dict[str, Any], finish: Finish | None = None) -> dict[str, Any]:
        head = {"model": self._model, "created_at": timestamp(time.time()), **output, "done": finish is not None}
        return head if finish is None else head | self._end(finish)

    def _end(self, finish: Finish) -> dict[str, Any]:
        total, prompt = time.monotonic_ns() - self._started, int(1e9 * finish.prefill_s)
        return {
            "done_reason": finish.reason,
            **({} if self._context is None else {"context": self._context("".join(self._text))}),
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": finish.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": finish.completion_tokens,
            "eval_duration": max(1, total - int(1e9 * finish.queue_s) - prompt),
        }


def _loaded(body: OllamaBody, make_fields: MakeFields) -> HandlerResponse:
    """Answer a request that only loads or unloads the model. Such a request has no prompt."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    head = {"model": body.model, "created_at": timestamp(time.time()), **make_fields("", {})}
    return json_response({**head, "done": True, "done_reason": reason})


@ROUTES.add(
    "POST",
    CHAT_PATH,
    "Answer in Ollama's format.",
    answer=OllamaChatAnswer,
    events=(OllamaChatAnswer,),
    example={
        "model": "rwkv7",
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": False,
        "options": {"num_predict": 64},
    },
)
async def chat(context: Context, body: OllamaChatBody) -> HandlerResponse:
    """Answer a conversation in Ollama's format. Nothing is stored."""
    if not body.messages:
        return _loaded(body, message_fields)
    size = sum(len(one.content) for one in body.messages)
    request: OllamaChat = await with_defaults_applied(context, await offload_if_large(size, body.chat))
    with rename_fields(**RENAMED):
        rows = await conversation_rows(context, request, "messages")
    formatter = OllamaFormatter(body, request.answer_format, message_fields)
    return await run(context, make_job(rows, request, CHAT_PATH), formatter, OutputDecoder(1), body.stream)


@ROUTES.add(
    "POST",
    GENERATE_PATH,
    "Answer in Ollama's format.",
    answer=OllamaGenerateAnswer,
    events=(OllamaGenerateAnswer,),
    example={"model": "rwkv7", "prompt": "Hello!", "stream": False, "options": {"num_predict": 64}},
)
async def generate(context: Context, body: OllamaGenerateBody) -> HandlerResponse:
    """Answer one prompt in Ollama's format.

    `context` continues an earlier answer: it has the tokens of the conversation. Nothing is stored.
    """
    if not body.prompt and body.suffix is None:
        return _loaded(body, response_fields)
    request = await with_defaults_applied(context, await offload_if_large(len(body.prompt), body.request))
    with rename_fields(**RENAMED):
        (row,) = await _generate_rows(context, body, request)
    answer_format = request.answer_format if isinstance(request, OllamaChat) else _RAW_FORMAT

    def tokens(text: str) -> list[int]:
        return [*row.prompt, *context.tokenizer.encode(text)]

    formatter = OllamaFormatter(body, answer_format, response_fields, tokens)
    return await run(context, make_job([row], request, GENERATE_PATH), formatter, OutputDecoder(1), body.stream)


async def _generate_rows(
    context: Context, body: OllamaGenerateBody, request: OllamaChat | OllamaRaw
) -> list[GenerateRequest]:
    if isinstance(request, OllamaRaw):
        text = str(request.prompt)
        stops = row_stops(request, built_in=() if body.suffix is None else (prompts.FIM_STOP,))
    elif not body.context:
        return await conversation_rows(context, request, "prompt")
    else:
        new = prompts.chat(request.messages, request.think, template=request.template)
        text, stops = prompts.continuation_prompt(new), request.stops
    if not body.context:
        return await openai_rows(context, request, [text], stops, "prompt")
    prompt = body.context + encode(context.tokenizer, text, "prompt", context.config)
    return await openai_rows(context, request, [prompt], stops, "context")
