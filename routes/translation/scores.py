"""Scores of translations: how likely the model finds them, and their texts after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from routes.context import Context
from routes.request.bodies import PriorityFields
from routes.request.jobs import encode_all, greedy_row, make_job, offload_if_large
from routes.response.event_stream import DecodedRow, OutputDecoder
from routes.response.generate import finished_rows
from rwkv_batch.request import GenerateRequest, PromptLogprobs

_DECIMALS = 4


class Scored(NamedTuple):
    """A text whose log-probability is wanted, after its prompt."""

    prompt: str
    text: str


async def mean_logprobs(
    context: Context, scored: Sequence[Scored], body: PriorityFields, origin: tuple[str, str], label: str
) -> list[float]:
    """Return each text's mean log-probability per token. Raises ServiceError.

    origin: names of a tuned state and an adapter
    """
    if not scored:
        return []
    characters = sum(len(one.prompt) + len(one.text) for one in scored)
    rows = await offload_if_large(characters, _rows, context, scored, origin)
    results = await finished_rows(context, make_job(rows, body, label), OutputDecoder(len(rows)))
    return [_mean(result) for result in results]


def _rows(context: Context, scored: Sequence[Scored], origin: tuple[str, str]) -> list[GenerateRequest]:
    def texts() -> Iterator[tuple[str, str]]:
        for one in scored:
            yield "text_list", one.prompt
            yield "text_list", one.text

    ids = encode_all(context.tokenizer, texts(), context.config)
    rows = []
    for prompt, text in zip(ids, ids, strict=True):
        row = greedy_row([*prompt, *text], 0, (), *origin)
        rows.append(msgspec.structs.replace(row, prompt_logprobs=PromptLogprobs(start=len(prompt))))
    return rows


def _mean(result: DecodedRow) -> float:
    values = result.scores("translation")
    return round(sum(values) / max(len(values), 1), _DECIMALS)
