"""The family's native batch form: many prompts or one conversation in, one object with indexed choices out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from routes.context import Context
from routes.request import prompts
from routes.request.bodies import DEFAULT_STOPS, BatchBody, GenerationBody, PromptBody
from routes.request.generate_requests import build_rows, off_loop
from routes.request.session_turn import as_turn
from routes.response.event_stream import new_job_id
from routes.response.generate import PlainDialect, RowResult, run
from routes.response.reply import Reply, failure, sse
from routes.response.transcript import RowUpdate, Transcript
from rwkv_batch.request import Finish, GenerateRequest, Job


def usage(finishes: Sequence[Finish | None], n: int = 1) -> dict[str, Any]:
    """OpenAI's usage object, summed over rows; the `n` continuations of a prompt read it once."""
    ends = [end for end in finishes if end is not None]
    read = [end for end in finishes[::n] if end is not None]
    prompt = sum(end.prompt_tokens for end in read)
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in read)},
    }


class BatchDialect(PlainDialect):
    """The family's batch form: one object, many indexed choices. Chunks bear an id for OpenAI clients only."""

    def __init__(self, model: str, object_name: str = "chat.completion", answer_id: str = "") -> None:
        head = {"object": object_name, "created": int(time.time()), "model": model}
        self._whole_head = {"id": answer_id or "rwkv7-batch", **head}
        self._chunk_head: dict[str, Any] = {"object": f"{object_name}.chunk"}
        if answer_id:
            self._chunk_head = {**self._whole_head, **self._chunk_head}

    def chunk(self, updates: list[RowUpdate]) -> bytes:
        """See Dialect."""
        choices: list[dict[str, Any]] = []
        for row in updates:
            if row.text:
                choices.append({"index": row.row, "delta": {"content": row.text}})
            if row.finish is not None:
                choices.append({"index": row.row, "delta": {}, "finish_reason": row.finish.reason})
        return sse({**self._chunk_head, "choices": choices}) if choices else b""

    def whole(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        choices = [_choice(index, row) for index, row in enumerate(rows)]
        return {**self._whole_head, "choices": choices, "usage": usage([row.finish for row in rows])}


def _choice(index: int, row: RowResult) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "message": {"role": "assistant", "content": row.text}}
    choice["finish_reason"] = row.finish.reason if row.finish is not None else "error"
    if row.finish is not None and row.finish.error is not None:
        choice |= failure(row.finish.error)
    return choice


def prompt_forms(body: BatchBody, stop_tokens: list[int | str] | None) -> tuple[list[str], list[int | str], str]:
    """Prompts, stops (None: the form's own), and the field they came from."""
    if body.messages:
        think = prompts.think_mode(body.enable_think)
        stops = list(prompts.THINK_FORMS[think].stops) if stop_tokens is None else stop_tokens
        return [prompts.chat(body.messages, think)], stops, "messages"
    if body.contents:
        return body.contents, list(DEFAULT_STOPS) if stop_tokens is None else stop_tokens, "contents"
    pairs = zip(body.prefixes, body.suffixes, strict=True)
    return [prompts.fill_in_the_middle(*pair) for pair in pairs], [*(stop_tokens or ()), prompts.FIM_STOP], "prefix"


def given_stops(body: GenerationBody) -> list[int | str] | None:
    """`stop_tokens` if the request has them."""
    return list(body.stop_tokens) if "stop_tokens" in body.model_fields_set else None


async def batch_rows(context: Context, body: BatchBody) -> list[GenerateRequest]:
    """The rows of a native batch body, without a session. Raises ServiceError."""
    texts, stops, field = prompt_forms(body, given_stops(body))
    characters = sum(map(len, texts))
    return await off_loop(characters, build_rows, context.tokenizer, context.config, body, texts, stops, field)


def _resume_text(body: PromptBody) -> tuple[str, str]:
    """What a session that exists reads, and the field it came from."""
    if body.messages:
        new = prompts.new_messages(body.messages)
        return prompts.chat(new, prompts.think_mode(body.enable_think)), "messages"
    texts, _, field = prompt_forms(body, [])
    return texts[0], field


async def serve(context: Context, body: PromptBody, label: str, sampler: str = "") -> Reply:
    """Answer a native batch body in the family's form; `sampler`: see Job."""
    rows = await batch_rows(context, body)
    if body.session_id is not None:
        rows = as_turn(context, rows, body.session_id, *_resume_text(body), wait=body.wait)
    job = Job(job_id=new_job_id(), rows=rows, sampler=sampler, timeout_s=body.timeout_s, label=label)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}" if body.messages else ""
    return await run(context, job, BatchDialect(body.model, answer_id=answer_id), transcript_of(body, job), body.stream)


def transcript_of(body: BatchBody, job: Job) -> Transcript:
    """How a native answer's text begins: with the tag that the prompt opened, or without white space."""
    opening = prompts.THINKING if body.messages and body.enable_think else ""
    return Transcript(job.num_rows, opening, strip=bool(body.messages) and not body.enable_think)
