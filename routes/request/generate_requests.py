"""Turns a validated body into the engine's rows, and checks the limits set by flags."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from routes.config import HttpConfig
from routes.request.bodies import GenerationBody
from routes.request.model_names import requested_adapter, requested_state
from rwkv_batch.errors import invalid
from rwkv_batch.request import GenerateRequest
from rwkv_batch.tokenizer import END_OF_TEXT, Tokenizer
from sampling.params import SamplingParams

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
    """Run `function` inline for short text, else on a thread, which keeps the event loop free."""
    if characters <= _INLINE_CHARACTERS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def split_stops(stops: Iterable[int | str]) -> tuple[list[int], list[bytes]]:
    """Return stop ids and stop strings. Id 0 is left out: it ends a row unless `ignore_eos` is set."""
    ids = sorted({stop for stop in stops if isinstance(stop, int) and stop != END_OF_TEXT})
    strings = sorted({stop.encode() for stop in stops if isinstance(stop, str)})
    return ids, strings


def row_stops(
    body: GenerationBody, default_stops: Iterable[int | str] = (), built_in: Iterable[int | str] = ()
) -> list[int | str]:
    """Return the stops of a request's rows.

    These are `stop_tokens` (or else `default_stops`), `stop`, and `built_in`. A constrained text has only the stops of
    the request: its constraint defines the end.
    """
    requested = list(body.stop_tokens) if "stop_tokens" in body.model_fields_set else None
    if body.constraint is not None:
        return [*(requested or []), *body.stop_texts]
    return [*(default_stops if requested is None else requested), *body.stop_texts, *built_in]


def encode(
    tokenizer: Tokenizer, prompt: str | list[int], field: str, config: HttpConfig, pad_zero: bool = False
) -> list[int]:
    """Return the token ids of one prompt. Raises ServiceError if there are none or too many."""
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
    tokenizer: Tokenizer, prompts: Iterable[tuple[str, str | list[int]]], config: HttpConfig, pad_zero: bool = False
) -> Iterator[list[int]]:
    """Yield the token ids of each (field, prompt). Raises ServiceError if the total is too large.

    Stops encoding at the first prompt that exceeds the limit.
    """
    total, limit = 0, config.max_request_tokens
    for field, prompt in prompts:
        ids = encode(tokenizer, prompt, field, config, pad_zero)
        total += len(ids)
        if total > limit:
            message = f"with it the request's prompts have {total} tokens or more, the limit is {limit}"
            raise invalid(field, f"{message} (--max-request-tokens); send fewer prompts at once", total)
        yield ids


def _estimate_tokens(tokenizer: Tokenizer, text: str, stop_at: int) -> int:
    """Estimate the number of tokens of a long text, slice by slice. Stops at `stop_at`."""
    count = 0
    for at in range(0, len(text), _SLICE_CHARACTERS):
        count += len(tokenizer.encode(text[at : at + _SLICE_CHARACTERS]))
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
    body: GenerationBody,
    prompts: Sequence[str | list[int]],
    stops: Sequence[int | str],
    field: str,
    n: int = 1,
) -> list[GenerateRequest]:
    """Return one row per prompt, with `n` continuations. Raises ServiceError.

    field: request field of the prompts, for errors

    Continuation i of prompt r uses seed + r * n + i, so no two continuations share a seed.
    """
    if len(prompts) > config.max_contents:
        limit = config.max_contents
        raise invalid(
            field,
            f"has {len(prompts)} prompts, the limit is {limit} (--max-contents); send several requests",
            len(prompts),
        )
    if body.max_tokens > config.max_tokens_limit:
        limit = config.max_tokens_limit
        raise invalid(
            "max_tokens", f"must be at most {limit} (--max-tokens-limit), got {body.max_tokens}", body.max_tokens
        )
    seed = secrets.randbits(64) if body.seed is None else body.seed
    mixture = [(member.name, member.weight) for member in body.states]
    state = "" if mixture else requested_state(body, config)
    adapter = requested_adapter(body, config)
    pad_zero = body.pad_zero and (not (state or mixture) or "pad_zero" in body.model_fields_set)
    constraint = body.constraint
    stop_ids, stop_strings = split_stops(stops)
    prompts_by_field = ((f"{field}[{index}]", prompt) for index, prompt in enumerate(prompts))
    return [
        GenerateRequest(
            prompt=ids,
            max_tokens=body.max_tokens,
            sampling=body.sampling((seed + index * n) % _SEEDS),
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            ignore_eos=body.ignore_eos,
            chunk_size=body.chunk_size if body.stream else 0,
            n=n,
            use_prefix_cache=body.use_prefix_cache,
            state=state,
            adapter=adapter,
            mixture=mixture,
            constraint=constraint,
        )
        for index, ids in enumerate(encode_all(tokenizer, prompts_by_field, config, pad_zero))
    ]
