"""Turns validated bodies into the engine's rows and jobs: model names, tokens, stops, sampling and sessions.

Checks the limits set by flags.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import msgspec

from routes.config import HttpConfig
from routes.context import Context
from routes.request import bodies, prompts
from routes.request.model_names import check_tuned_name, requested_adapter, requested_state
from routes.request_context import current_request, warn
from rwkv_batch.errors import invalid
from rwkv_batch.request import GenerateRequest, Job, SessionTurn
from rwkv_batch.tokenizer import END_OF_TEXT, MAX_TOKEN_BYTES, Tokenizer
from sampling.params import SamplingParams

BIG_BATCH_LABEL = "big_batch"
"""Label of the jobs of `/big_batch` in the engine's counters."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_INLINE_CHARACTERS = 200_000
_SEEDS = 2**64
_CHARACTERS_PER_TOKEN = 4
"""A text longer than this times the token limit is estimated before it is encoded."""
_SLICE_CHARACTERS = 65_536
_ESTIMATE_MARGIN = 2
"""Slicing changes token borders, so the estimate refuses a text only far above the limit."""


async def offload_if_large(
    characters: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Run `function` inline for short text, else on a thread. A thread keeps the event loop free."""
    if characters <= _INLINE_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def split_stops(stops: Iterable[int | str]) -> tuple[list[int], list[bytes]]:
    """Return stop ids and stop strings. Id 0 is left out: it ends a row unless `ignore_eos` is set."""
    ids = sorted({stop for stop in stops if isinstance(stop, int) and stop != END_OF_TEXT})
    strings = sorted({stop.encode() for stop in stops if isinstance(stop, str)})
    return ids, strings


def row_stops(
    body: bodies.GenerationBody, default_stops: Iterable[int | str] = (), built_in: Iterable[int | str] = ()
) -> list[int | str]:
    """Return the stops of a request's rows.

    These are `stop_tokens` (or else `default_stops`), `stop`, and `built_in`. A constrained text has only the stops of
    the request: its constraint defines the end.
    """
    requested = list(body.stop_tokens) if "stop_tokens" in body.model_fields_set else None
    if body.constraint is not None:
        return [*(requested or []), *body.more_stops]
    return [*(default_stops if requested is None else requested), *body.more_stops, *built_in]


def encode(
    tokenizer: Tokenizer,
    prompt: str | list[int],
    field: str,
    config: HttpConfig,
    pad_zero: bool = False,
    keep: int | None = None,
) -> list[int]:
    """Return the token ids of one prompt. Raises ServiceError if there are none or too many.

    keep: how many of the last ones to return; None: all
    """
    limit = config.max_prompt_tokens
    if isinstance(prompt, str) and len(prompt) > _CHARACTERS_PER_TOKEN * limit:
        count = _estimate_tokens(tokenizer, prompt, _ESTIMATE_MARGIN * limit)
        if count > _ESTIMATE_MARGIN * limit:
            raise invalid(
                field,
                f"has more than {count} tokens, the limit is {limit} (--max-prompt-tokens); send a shorter prompt",
                count,
            )
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if keep is not None:
        ids = ids[-keep:]
    if pad_zero:
        ids.insert(0, END_OF_TEXT)
    if not ids:
        raise invalid(field, "must not be empty", prompt)
    if len(ids) > limit:
        raise invalid(
            field, f"has {len(ids)} tokens, the limit is {limit} (--max-prompt-tokens); send a shorter prompt", len(ids)
        )
    return ids


def encode_all(
    tokenizer: Tokenizer,
    prompts: Iterable[tuple[str, str | list[int]]],
    config: HttpConfig,
    pad_zero: bool = False,
    keep: int | None = None,
) -> Iterator[list[int]]:
    """Yield the token ids of each (field, prompt). Raises ServiceError if the total is too large.

    Stops encoding at the first prompt that exceeds the limit.
    """
    total, limit = 0, config.max_request_tokens
    for field, prompt in prompts:
        ids = encode(tokenizer, prompt, field, config, pad_zero, keep)
        total += len(ids)
        if total > limit:
            message = f"with it the request's prompts have {total} tokens or more, the limit is {limit}"
            raise invalid(field, f"{message} (--max-request-tokens); send fewer prompts at once", total)
        yield ids


def _estimate_tokens(tokenizer: Tokenizer, text: str, stop_at: int) -> int:
    """Estimate the number of tokens of a long text, slice by slice. Stops at `stop_at`."""
    count = 0
    for start in range(0, len(text), _SLICE_CHARACTERS):
        count += len(tokenizer.encode(text[start : start + _SLICE_CHARACTERS]))
        if count > stop_at:
            break
    return count


def greedy_row(
    prompt: list[int], max_tokens: int, stops: Iterable[int | str], state: str | None = None, adapter: str | None = None
) -> GenerateRequest:
    """Return a row with greedy sampling and no streaming."""
    stop_ids, stop_strings = split_stops(stops)
    return GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        chunk_size=0,
        state=state or "",
        adapter=adapter or "",
    )


def build_rows(
    tokenizer: Tokenizer,
    config: HttpConfig,
    body: bodies.GenerationBody,
    prompts: Sequence[str | list[int]],
    stops: Sequence[int | str],
    field: str,
    n: int = 1,
) -> list[GenerateRequest]:
    """Return one row per prompt, with `n` continuations. Raises ServiceError.

    field: request field of the prompts, for errors

    Continuation i of prompt r uses seed + r * n + i, so no two continuations share a seed.
    """
    if (count := len(prompts)) > (limit := config.max_contents):
        raise invalid(
            field, f"has {count} prompts, the limit is {limit} (--max-contents); send several requests", count
        )
    if body.max_tokens > config.max_tokens_limit:
        limit, other_names = config.max_tokens_limit, ("max_completion_tokens", "max_output_tokens")
        given = next((name for name in other_names if getattr(body, name, None) is not None), "max_tokens")
        raise invalid(given, f"must be at most {limit} (--max-tokens-limit), got {body.max_tokens}", body.max_tokens)
    states = len(body.states) or 1
    current_request().check_rows(len(prompts) * n * states, states)
    seed = secrets.randbits(64) if body.seed is None else body.seed
    mixture = [(check_tuned_name(one.name, body.model, "state"), one.weight) for one in body.states]
    state = "" if mixture else requested_state(body, config)
    adapter = requested_adapter(body, config)
    pad_zero = body.pad_zero and (not (state or mixture) or "pad_zero" in body.model_fields_set)
    constraint = body.row_constraint
    keep = body.truncate_prompt_tokens
    if keep is not None and getattr(body, "session_id", None) is not None:
        raise invalid("truncate_prompt_tokens", "cannot be combined with session_id; leave one of them out", keep)
    keep = config.max_prompt_tokens - pad_zero if keep == -1 else keep
    sampling = body.row_sampling(tokenizer.encode)
    stop_ids, stop_strings = split_stops(stops)
    prediction = _prediction(tokenizer, config, body, len(prompts))
    listed = getattr(body, field, None)
    has_index = isinstance(listed, list) and len(listed) == len(prompts)  # else it has no entry per prompt
    names = (f"{field}[{index}]" if has_index else field for index in range(len(prompts)))
    prompts_by_field = zip(names, prompts, strict=True)
    return [
        GenerateRequest(
            prompt=ids,
            max_tokens=body.max_tokens,
            sampling=msgspec.structs.replace(sampling, seed=(seed + index * n) % _SEEDS),
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            ignore_eos=body.ignore_eos,
            include_stop=body.include_stop_str_in_output,
            chunk_size=body.chunk_size if body.stream else 0,
            n=n,
            use_prefix_cache=body.use_prefix_cache,
            state=state,
            adapter=adapter,
            mixture=mixture,
            constraint=constraint,
            prediction=prediction,
            speculation="off" if body.speculation == "off" else "",
        )
        for index, ids in enumerate(encode_all(tokenizer, prompts_by_field, config, pad_zero, keep))
    ]


async def make_rows(
    context: Context,
    body: bodies.GenerationBody,
    prompts: Sequence[str | list[int]],
    stops: Sequence[int | str],
    field: str,
    n: int = 1,
) -> list[GenerateRequest]:
    """Call `build_rows`, on a thread if the texts are long. Raises ServiceError."""
    size = sum(map(len, prompts)) + len(body.predicted_text)
    return await offload_if_large(size, build_rows, context.tokenizer, context.config, body, prompts, stops, field, n)


def _prediction(tokenizer: Tokenizer, config: HttpConfig, body: bodies.GenerationBody, num_prompts: int) -> list[int]:
    """Return the tokens of the request's prediction, which each row has. Raises ServiceError.

    If speculation is off, a prediction is ignored with a warning.
    """
    if not body.predicted_text:
        return []
    if "off" in (config.speculate, body.speculation):
        where = '`speculation` is "off"' if body.speculation == "off" else "the service runs without --speculate"
        warn("prediction", f"prediction: was ignored, because {where}")
        return []
    text = body.predicted_text[: body.max_tokens * MAX_TOKEN_BYTES]
    ids = tokenizer.encode(text)[: body.max_tokens]
    if len(ids) * num_prompts > config.max_request_tokens:
        raise invalid(
            "prediction",
            f"has {len(ids)} tokens for each of {num_prompts} prompts, the limit of all is "
            f"{config.max_request_tokens} (--max-request-tokens); send fewer prompts at once or a shorter prediction",
            len(ids),
        )
    return ids


async def as_turn(
    context: Context,
    rows: list[GenerateRequest],
    prompt: str | list[int],
    session_id: str,
    resume: str | list[int],
    field: str,
    *,
    branch_from: int | None = None,
    wait: bool = True,
) -> list[GenerateRequest]:
    """Return the request's one row as a session turn. Raises ServiceError.

    prompt: prompt of a new session
    resume: prompt of an existing session, often the same
    """
    if len(rows) != 1:
        raise invalid(field, f"a session takes exactly one prompt per request, got {len(rows)}", len(rows))
    resume_ids = without_padding(rows[0].prompt) if resume == prompt else None
    ids = await offload_if_large(len(resume), _resume_ids, context, resume, resume_ids, field)
    turn = SessionTurn(
        session_id=session_id,
        resume_prompt=ids,
        branch_from=branch_from,
        wait=wait,
        max_replayed_tokens=context.config.max_request_tokens,
    )
    return [msgspec.structs.replace(rows[0], session=turn)]


def _resume_ids(context: Context, resume: str | list[int], resume_ids: list[int] | None, field: str) -> list[int]:
    """Return the token ids of a turn after the previous one.

    resume_ids: token ids of `resume`, if it is already encoded

    Tokens are matched greedily from the left. If the added blank line is a token of its own, `resume_ids` stay valid.
    """
    if isinstance(resume, list):
        return encode(context.tokenizer, resume, field, context.config)
    text = prompts.continuation_prompt(resume)
    if resume_ids is None or text == resume:
        return encode(context.tokenizer, resume_ids or text, field, context.config)
    first = context.tokenizer.encode(text[:MAX_TOKEN_BYTES])[:1]
    is_separate_token = context.tokenizer.decode_bytes(first) == prompts.TURN_SEPARATOR.encode()
    return encode(context.tokenizer, first + resume_ids if is_separate_token else text, field, context.config)


def without_padding(ids: list[int]) -> list[int]:
    """Return the ids without the token that `pad_zero` added. No text encodes to that token."""
    return ids[1:] if ids[0] == END_OF_TEXT else ids


def make_job(rows: list[GenerateRequest], body: bodies.PriorityFields, label: str, sampler: str = "") -> Job:
    """Build a job of these rows, with the body's priority. Its id is unique among all HTTP workers."""
    return Job(
        job_id=secrets.token_hex(16),
        rows=rows,
        sampler=sampler,
        timeout_s=body.timeout_s,
        label=label,
        priority=body.requested_priority,
        cache_salt=body.cache_salt if isinstance(body, bodies.PrefixCacheFields) else "",
    )


async def native_job(context: Context, body: bodies.BatchBody, label: str, sampler: str = "") -> Job:
    """Build the job of a native batch body.

    It is a session turn if the body names a session. Raises ServiceError.
    """
    texts, stops, field = prompts_and_stops(body)
    rows = await make_rows(context, body, texts, stops, field)
    if isinstance(body, bodies.PromptBody) and body.session_id is not None:
        resume = texts[0]
        if body.messages:
            think = prompts.think_mode(body.enable_think)
            resume = prompts.chat(prompts.new_messages(body.messages), think, template=body.template)
        rows = await as_turn(context, rows, texts[0], body.session_id, resume, field, wait=body.wait)
    return make_job(rows, body, label, sampler)


def prompts_and_stops(body: bodies.BatchBody) -> tuple[list[str], list[int | str], str]:
    """Return prompts, stops, and the request field of the prompts."""
    if body.messages:
        think = prompts.think_mode(body.enable_think)
        default_stops = prompts.answer_stops(think, may_call=False, template=body.template)
        return [prompts.chat(body.messages, think, template=body.template)], row_stops(body, default_stops), "messages"
    if body.contents:
        return body.contents, row_stops(body, bodies.DEFAULT_STOPS), "contents"
    pairs = zip(body.prefixes, body.suffixes, strict=True)
    stops = row_stops(body, built_in=(prompts.FIM_STOP,))
    return [prompts.fill_in_the_middle(*pair) for pair in pairs], stops, "prefix"
