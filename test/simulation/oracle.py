"""Predicts a row's answer from its history, prompt and seed. It does not use the engine's output code."""

from __future__ import annotations

from dataclasses import dataclass

from rwkv_batch.request import FinishReason, GenerateRequest
from rwkv_batch.tokenizer import END_OF_TEXT
from test.simulation.device import TOKENIZER, fold, mixed, sample_token, score_of
from test.simulation.history import Beginning, History, began_of, shares_of


@dataclass(frozen=True)
class Answer:
    """The whole answer of an uninterrupted row."""

    reason: FinishReason
    sampled: list[int]
    raw: bytes
    """text of all sampled tokens"""
    text: bytes
    """the text up to the stop"""
    kept: list[int]
    """token ids that its session keeps"""


def predict(before: list[int], request: GenerateRequest, continuation: int = 0) -> Answer:
    """Return the answer after the tokens `before` (history and prompt)."""
    if request.max_tokens == 0:
        return Answer(FinishReason.LENGTH, [], b"", b"", [])
    stop_ids = set(request.stop_ids) - {END_OF_TEXT} | (set() if request.ignore_eos else {END_OF_TEXT})
    stops = list(request.stop_strings)
    for token in stop_ids:
        text = TOKENIZER.byte_table[token]
        if len(text) > 1 and set(text) == set(b"\n"):
            stops.append(text)  # a blank line counts wherever it comes from
    seed = (request.sampling.seed + continuation) % (1 << 64)
    began, shares = began_of(before), shares_of(request)
    states, sampled, whole = History(before, began).states, [], b""
    while True:
        token = sample_token(mixed(states, shares), seed, len(sampled), request.ignore_eos)
        sampled.append(token)
        if token in stop_ids:
            return Answer(FinishReason.STOP, sampled, whole, whole, sampled[:-1])
        whole += TOKENIZER.byte_table[token]
        ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
        if ends:
            return Answer(FinishReason.STOP, sampled, whole, whole[: min(ends)], _tokens_until(sampled, min(ends)))
        if len(sampled) >= request.max_tokens:
            return Answer(FinishReason.LENGTH, sampled, whole, whole, sampled)
        states = tuple(fold(state, [token], began.mark) for state in states)


def _tokens_until(sampled: list[int], end: int) -> list[int]:
    """Return whole tokens of the first `end` bytes; a cut token is tokenised again."""
    kept: list[int] = []
    for token in sampled:
        text = TOKENIZER.byte_table[token]
        if len(text) > end:
            return kept + (TOKENIZER.encode_bytes(text[:end]) if end else [])
        kept.append(token)
        end -= len(text)
    return kept


def prompt_of(request: GenerateRequest, i: int) -> list[int]:
    """Return the tokens that a request's row `i` reads before it samples."""
    return request.prompt + request.candidates[i] if request.candidates else request.prompt


def predict_scores(request: GenerateRequest, i: int, began: Beginning) -> list[float]:
    """Return the log-probabilities of row `i`. The first row reports those of a shared prompt."""
    if request.prompt_logprobs is None:
        return []
    prompt, first = prompt_of(request, i), request.prompt_logprobs.start
    first = max(first, len(request.prompt)) if i else first
    base = began.bases[0]
    return [score_of(fold(base, prompt[:index], began.mark), prompt[index]) for index in range(first, len(prompt))]
