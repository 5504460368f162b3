"""Estimates a run: counts lines and tokens, and answers a few lines to estimate the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from programs.batch.lines import LineWorker
from programs.batch.tasks import FIM, SCORE, TRANSLATE, Task, TaskRequest
from programs.record import LineError, Record
from routes.request import prompts
from routes.request.bodies import PromptBody
from routes.request.jobs import prompts_and_stops
from routes.request.json_body import validate
from routes.translate import translation_prompt
from rwkv_batch.errors import ServiceError
from rwkv_batch.tokenizer import Tokenizer

SAMPLE = 64
"""Lines that are answered, spread over the input."""


class Estimate:
    """Counts records and keeps a sample."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._tokenizer = Tokenizer()
        self._stride = 1
        self.lines = self.unreadable = self.prompt_tokens = 0
        self.sample: list[Record] = []
        self._sample_tokens: list[int] = []

    def count(self, records: Iterator[Record]) -> None:
        """Reads all records."""
        for record in records:
            if record.verbatim is not None:
                continue
            self.lines += 1
            tokens = self._tokens(record)
            if tokens is None:
                self.unreadable += 1
            else:
                self.prompt_tokens += tokens
                self._keep(record, tokens)

    def _tokens(self, record: Record) -> int | None:
        """Returns the approximate number of prompt tokens, or None without a prompt."""
        try:
            return None if record.problem else len(self._tokenizer.encode(_prompt(self._task.request(record))))
        except (LineError, ServiceError):
            return None

    def _keep(self, record: Record, tokens: int) -> None:
        """Keeps every `stride`-th record. Doubles the stride when the sample is full."""
        if self.lines % self._stride:
            return
        self.sample.append(record)
        self._sample_tokens.append(tokens)
        if len(self.sample) > SAMPLE:
            self.sample, self._sample_tokens = self.sample[1::2], self._sample_tokens[1::2]
            self._stride *= 2

    async def figures(self, worker: LineWorker) -> dict[str, Any]:
        """Answers the sample and returns the estimate."""
        figures: dict[str, Any] = {
            "lines": self.lines,
            "unreadable": self.unreadable,
            "prompt_tokens": self.prompt_tokens,
        }
        if not self.sample:
            return figures
        started = time.monotonic()
        outcomes = await asyncio.gather(*(asyncio.create_task(worker.outcome(record)) for record in self.sample))
        seconds = time.monotonic() - started
        ratio = self.prompt_tokens / max(1, sum(self._sample_tokens))
        return figures | {
            "sampled_lines": len(self.sample),
            "sample_failed": sum(bool(outcome.problem) for outcome in outcomes),
            "completion_tokens": round(ratio * sum(outcome.completion_tokens for outcome in outcomes)),
            "seconds": round(ratio * seconds, 1),
        }


def _prompt(request: TaskRequest) -> str:
    """Returns the approximate prompt. Raises ServiceError if the body is invalid."""
    if request.path == TRANSLATE:
        return translation_prompt(
            request.body["source_lang"], request.body["target_lang"], request.body["text_list"][0]
        )
    if request.path == SCORE:
        return str(request.body["contents"][0]) + "".join(map(str, request.body["candidates"]))
    if request.path == FIM:
        return prompts.fill_in_the_middle(request.body["prefix"][0], request.body["suffix"][0])
    return prompts_and_stops(validate(PromptBody, request.body))[0][0]
