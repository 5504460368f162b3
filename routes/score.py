"""`POST /v1/score`: log-probabilities of candidate texts after a prompt."""

from __future__ import annotations

import itertools
import time
import uuid
from functools import partial
from typing import Annotated, Any, Self

import msgspec
from pydantic import Field, model_validator

from routes.context import Context
from routes.request.bodies import ModelFields, PrefixCacheFields, PriorityFields, Texts
from routes.request.fields import FixedSamplingFields, body_error
from routes.request.jobs import encode, encode_all, greedy_row, make_job, offload_if_large
from routes.request.model_names import requested_origin
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import run_full
from routes.response.http_response import HandlerResponse
from routes.response.response_models import Scores
from routes.route import Routes
from rwkv_batch.errors import ErrorKind, invalid
from rwkv_batch.request import GenerateRequest, PromptLogprobs

EXAMPLE = {"contents": ["The capital of France is"], "candidates": [" Paris", " London", " a river"]}
ROUTES = Routes()

PATH = "/v1/score"
MAX_SCORED_TOKENS = 1_000_000
"""Limit of candidate tokens per request. Their log-probabilities stay in memory until the answer is complete."""
MAX_ROW_TOKENS = 16_000_000
"""Limit of the tokens of all rows, each with its prompt. They stay in memory until the last row has run."""


class ScoreBody(FixedSamplingFields, PriorityFields, PrefixCacheFields, ModelFields):
    """Prompts with candidate texts."""

    contents: Texts = Field(min_length=1, description="The prompts. Each is computed once.")
    candidates: Texts | Annotated[list[Texts], Field(fail_fast=True)] = Field(
        min_length=1,
        description="Candidate texts: one list for all prompts, or a list per prompt. A candidate is "
        "tokenised on its own, like generated text.",
    )
    pad_zero: bool = Field(False, description="Put token 0 before each prompt, which may then be empty.")
    logprobs: bool = Field(False, description="Include the log-probability of each token.")

    @property
    def candidate_lists(self) -> list[list[str]]:
        candidate_lists = [one for one in self.candidates if not isinstance(one, str)]
        return candidate_lists or [self.candidates] * len(self.contents)  # type: ignore[list-item]  # all are texts

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        if len(self.candidate_lists) != len(self.contents):
            counts = f"{len(self.candidate_lists)} lists for {len(self.contents)} prompts"
            raise body_error(f"candidates must be texts, or one list per prompt: got {counts}", "candidates")
        if not all(self.candidate_lists):
            raise body_error("candidates must have at least one text for every prompt", "candidates")
        return self


def _rows(context: Context, body: ScoreBody) -> list[GenerateRequest]:
    """Return one request per prompt, with one row per candidate. Raises ServiceError."""
    token_ids: dict[str, list[int]] = {}
    rows: list[GenerateRequest] = []
    origin = requested_origin(body, context.config)
    scored = row_tokens = 0
    named = ((f"contents[{i}]", content) for i, content in enumerate(body.contents))
    prompts = encode_all(context.tokenizer, named, context.config, body.pad_zero)
    for i, (prompt, texts) in enumerate(zip(prompts, body.candidate_lists, strict=True)):
        for number, text in enumerate(texts):
            if text not in token_ids:
                token_ids[text] = encode(context.tokenizer, text, _field(body, i, number), context.config)
            _check_length(context, body, prompt, token_ids[text], (i, number))
            scored, row_tokens = scored + len(token_ids[text]), row_tokens + len(prompt) + len(token_ids[text])
        _check_sizes(scored, row_tokens)
        rows.append(_row(prompt, [token_ids[text] for text in texts], origin, body.use_prefix_cache))
    return rows


def _row(
    prompt: list[int], candidates: list[list[int]], origin: tuple[str, str], use_prefix_cache: bool
) -> GenerateRequest:
    """Return a request that scores all candidates after one prompt. `origin`: names of a state and an adapter."""
    return msgspec.structs.replace(
        greedy_row(prompt, 0, (), *origin),
        candidates=candidates,
        prompt_logprobs=PromptLogprobs(start=len(prompt), top=1),
        use_prefix_cache=use_prefix_cache,
    )


def _field(body: ScoreBody, content: int, number: int) -> str:
    shared = isinstance(body.candidates[0], str)
    return f"candidates[{number}]" if shared else f"candidates[{content}][{number}]"


def _check_length(
    context: Context, body: ScoreBody, prompt: list[int], candidate: list[int], position: tuple[int, int]
) -> None:
    limit, length = context.config.max_prompt_tokens, len(prompt) + len(candidate)
    if length > limit:
        message = f"has {length} tokens with contents[{position[0]}], the limit is {limit} (--max-prompt-tokens)"
        raise invalid(_field(body, *position), message, length)


def _check_sizes(scored: int, row_tokens: int) -> None:
    for tokens, limit, what in (
        (scored, MAX_SCORED_TOKENS, "tokens in total"),
        (row_tokens, MAX_ROW_TOKENS, "tokens in total, counting each candidate's prompt"),
    ):
        if tokens > limit:
            raise invalid("candidates", f"have more than {limit} {what}; send fewer per request", tokens)


def _answer(body: ScoreBody, rows: list[GenerateRequest], results: list[DecodedRow]) -> dict[str, Any]:
    """Return the answer's body. Raises ServiceError if a row failed."""
    remaining, scores, cached = iter(results), [], 0
    for index, row in enumerate(rows):
        found = list(itertools.islice(remaining, row.num_rows))
        scores.append({"index": index, "candidates": [_candidate(body, *one) for one in enumerate(found)]})
        cached += 0 if found[0].finish is None else found[0].finish.cached_tokens
    prompt = sum(row.num_prompt_tokens for row in rows)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "score",
        "created": int(time.time()),
        "model": body.model,
        "scores": scores,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 0,
            "total_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def _candidate(body: ScoreBody, number: int, result: DecodedRow) -> dict[str, Any]:
    values = result.scores("candidate")
    entry: dict[str, Any] = {
        "index": number,
        "logprob": sum(values),
        "tokens": len(values),
        "is_greedy": all(token.logprob >= token.top[0][1] for token in result.prompt_logprobs),
    }
    return entry | ({"token_logprobs": values} if body.logprobs else {})


@ROUTES.add(
    "POST",
    PATH,
    "Score candidate texts after prompts.",
    is_generation=True,
    answer=Scores,
    errors=(ErrorKind.TIMEOUT,),
    example=EXAMPLE,
)
async def score(context: Context, body: ScoreBody) -> HandlerResponse:
    """Return the log-probability of each candidate after its prompt."""
    limit, count = context.config.max_contents, sum(map(len, body.candidate_lists))
    if count > limit:
        raise invalid(
            "candidates", f"make {count} rows, the limit is {limit} (--max-contents); send fewer per request", count
        )
    characters = sum(map(len, body.contents)) + sum(len(text) for texts in body.candidate_lists for text in texts)
    rows = await offload_if_large(characters, _rows, context, body)
    job = make_job(rows, body, PATH)
    return await run_full(context, job, OutputDecoder(job.num_rows), partial(_answer, body, rows))
