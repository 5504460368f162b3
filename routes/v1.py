"""`POST /v1/chat/completions`: many prompts, or one conversation, continued in the running batch."""

from __future__ import annotations

import time
import uuid
from typing import Any

from routes import prompts
from routes.bodies import PromptBody
from routes.context import Context
from routes.feed import new_job_id
from routes.generate import PlainDialect, RowResult, run
from routes.reply import Reply, native_error, sse
from routes.route import Route
from routes.rows import build_rows, off_loop
from routes.text import RowNews, Transcript
from rwkv_batch.request import Job


def usage(rows: list[RowResult]) -> dict[str, Any]:
    """OpenAI's usage object, summed over rows."""
    ends = [row.finish for row in rows if row.finish is not None]
    prompt = sum(end.prompt_tokens for end in ends)
    completion = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends)},
    }


class BatchDialect(PlainDialect):
    """The family's batch form: one object, many indexed choices. Chunks bear an id for OpenAI clients only."""

    def __init__(self, model: str, object_name: str = "chat.completion", answer_id: str = "") -> None:
        head = {"object": object_name, "created": int(time.time()), "model": model}
        self._whole_head = {"id": answer_id or "rwkv7-batch", **head}
        self._chunk_head: dict[str, Any] = {"object": f"{object_name}.chunk"}
        if answer_id:
            self._chunk_head = {**self._whole_head, **self._chunk_head}

    def chunk(self, news: list[RowNews]) -> bytes:
        """See Dialect."""
        choices: list[dict[str, Any]] = []
        for row in news:
            if row.text:
                choices.append({"index": row.row, "delta": {"content": row.text}})
            if row.finish is not None:
                choices.append({"index": row.row, "delta": {}, "finish_reason": row.finish.reason})
        return sse({**self._chunk_head, "choices": choices}) if choices else b""

    def whole(self, rows: list[RowResult]) -> Any:
        """See Dialect."""
        choices = [_choice(index, row) for index, row in enumerate(rows)]
        return {**self._whole_head, "choices": choices, "usage": usage(rows)}


def _choice(index: int, row: RowResult) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "message": {"role": "assistant", "content": row.text}}
    choice["finish_reason"] = row.finish.reason if row.finish is not None else "error"
    if row.finish is not None and row.finish.error is not None:
        choice |= native_error(row.finish.error)
    return choice


def prompt_forms(body: PromptBody) -> tuple[list[str], list[int | str], str]:
    """Prompts, stops, and the field they came from."""
    stops: list[int | str] = list(body.stop_tokens)
    if body.messages:
        return [prompts.chat(body.messages, body.enable_think)], stops, "messages"
    if body.contents:
        return body.contents, stops, "contents"
    own = stops if "stop_tokens" in body.model_fields_set else []
    pairs = zip(body.prefixes, body.suffixes, strict=True)
    return [prompts.fill_in_the_middle(*pair) for pair in pairs], [*own, prompts.FIM_STOP], "prefix"


async def batch_job(context: Context, body: PromptBody, sampler: str, label: str) -> Job:
    """The job of a native batch body. Raises ServiceError."""
    texts, stops, field = prompt_forms(body)
    characters = sum(map(len, texts))
    rows = await off_loop(characters, build_rows, context.tokenizer, context.config, body, texts, stops, field)
    return Job(job_id=new_job_id(), rows=rows, sampler=sampler, timeout_s=body.timeout_s, label=label)


async def chat_completions(context: Context, body: PromptBody) -> Reply:
    """Continue every prompt; answers come in the order of the prompts, or as they grow with `stream`."""
    job = await batch_job(context, body, "rapid", "/v1/chat/completions")
    opening = prompts.THINKING if body.messages and body.enable_think else ""
    transcript = Transcript(len(job.rows), opening, strip=bool(body.messages) and not body.enable_think)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}" if body.messages else ""
    return await run(context, job, BatchDialect(body.model, answer_id=answer_id), transcript, body.stream)


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        PromptBody,
        "Continue many prompts, or one conversation; drawn by Rapid-Sampling where it runs.",
        is_work=True,
        streams=True,
    ),
)
