"""Builds jobs from request bodies."""

from __future__ import annotations

import uuid

from routes.context import Context
from routes.request import prompts
from routes.request.bodies import DEFAULT_STOPS, BatchBody, PriorityFields, PromptBody
from routes.request.generate_requests import build_rows, offload_if_large, row_stops
from routes.request.session_turn import as_turn
from rwkv_batch.request import GenerateRequest, Job


def make_job(rows: list[GenerateRequest], body: PriorityFields, label: str, sampler: str = "") -> Job:
    """Build a job of these rows, with the body's priority. Its id is unique among all HTTP workers."""
    return Job(
        job_id=uuid.uuid4().hex,
        rows=rows,
        sampler=sampler,
        timeout_s=body.timeout_s,
        label=label,
        priority=body.requested_priority,
    )


async def native_job(context: Context, body: BatchBody, label: str, sampler: str = "") -> Job:
    """Build the job of a native batch body, as a session turn if it names one. Raises ServiceError."""
    texts, stops, field = prompts_and_stops(body)
    characters = sum(map(len, texts))
    rows = await offload_if_large(characters, build_rows, context.tokenizer, context.config, body, texts, stops, field)
    if isinstance(body, PromptBody) and body.session_id is not None:
        resume = texts[0]
        if body.messages:
            think = prompts.think_mode(body.enable_think)
            resume = prompts.chat(prompts.new_messages(body.messages), think, template=body.template)
        rows = await as_turn(context, rows, texts[0], body.session_id, resume, field, wait=body.wait)
    return make_job(rows, body, label, sampler)


def prompts_and_stops(body: BatchBody) -> tuple[list[str], list[int | str], str]:
    """Return prompts, stops, and the request field of the prompts."""
    if body.messages:
        think = prompts.think_mode(body.enable_think)
        default_stops = prompts.answer_stops(think, may_call=False, template=body.template)
        return [prompts.chat(body.messages, think, template=body.template)], row_stops(body, default_stops), "messages"
    if body.contents:
        return body.contents, row_stops(body, DEFAULT_STOPS), "contents"
    pairs = zip(body.prefixes, body.suffixes, strict=True)
    stops = row_stops(body, built_in=(prompts.FIM_STOP,))
    return [prompts.fill_in_the_middle(*pair) for pair in pairs], stops, "prefix"
