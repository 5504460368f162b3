"""Calls that LLM and AsyncLLM share, as coroutines for the engine's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from programs.backends.handlers import call_handler
from programs.library.engine_thread import EngineThread
from programs.library.job_outputs import JobOutputs, all_failed, submit_work
from programs.library.outputs import CompletionOutput, Piece, RequestOutput, Score, State, is_state, root
from programs.library.params import LLMError, SamplingParams
from programs.library.prompt_requests import (
    GenerateInput,
    PromptRequest,
    requests_from_conversations,
    requests_from_prompts,
)
from routes.context import Context
from routes.response.generate import call_engine
from routes.score import PATH as SCORE
from routes.state import CACHE_LEVELS
from routes.translation.languages import LABEL as TRANSLATE
from rwkv_batch.calls import DeleteSessions, ExportSession, ImportSession, ListSessions
from rwkv_batch.request import Priority
from rwkv_batch.tokenizer import END_OF_TEXT

_ROWS_PER_JOB = 1024
_JOBS_AHEAD = 8
"""Jobs of one call that are in the engine at a time."""
_STATEFUL_JOBS_AHEAD = 512
"""The same for jobs with one row."""
_FORCING_BIAS = 1e9
"""Logit bias that forces a token."""
_OK = 200
_MAX_SESSIONS = 1_000_000

RequestFactory = Callable[[Context, Sequence[Any], int, GenerateInput], Awaitable[list[PromptRequest]]]


class Call:
    """One call with many prompts, split into jobs."""

    def __init__(
        self, engine: EngineThread, make_requests: RequestFactory, prompts: Sequence[Any], generate_input: GenerateInput
    ) -> None:
        self._engine = engine
        self._make_requests = make_requests
        self._generate_input = generate_input
        is_stateful = generate_input.source is not None
        size = 1 if is_stateful else max(1, _ROWS_PER_JOB // max(1, generate_input.params.n))
        if generate_input.session_id is not None:
            size = max(1, len(prompts))  # several prompts with one session are refused later
        self._jobs = [(start, prompts[start : start + size]) for start in range(0, len(prompts), size)]
        self._max_jobs = _STATEFUL_JOBS_AHEAD if is_stateful else _JOBS_AHEAD

    async def _begin(self, first: int, prompts: Sequence[Any]) -> JobOutputs:
        context = self._engine.context
        prompt_requests = await self._make_requests(context, prompts, first, self._generate_input)
        return await submit_work(context, prompt_requests, first, self._generate_input.params.timeout_s)

    async def all_outputs(self) -> list[RequestOutput]:
        """Returns all answers in the order of the prompts. Runs on the engine's loop. Raises LLMError if all failed."""
        slots = asyncio.Semaphore(self._max_jobs)

        async def one(first: int, prompts: Sequence[Any]) -> JobOutputs:
            async with slots:
                answers = await self._begin(first, prompts)
                await answers.wait_finished()
                answers.read()
                return answers

        tasks = [asyncio.ensure_future(one(*job)) for job in self._jobs]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # no effect on finished ones
        return _outputs(answers)

    def run_with_callback(self, callback: Callable[[Piece], None]) -> list[RequestOutput]:
        """Like `all_outputs`, on the caller's thread. `callback` gets every piece."""
        read = []
        for answers in self._jobs_in_order():
            read.append(answers)
            while not answers.is_done:
                for piece in answers.read():
                    callback(piece)
        return _outputs(read)

    def pieces(self) -> Iterator[Piece]:
        """Yields pieces on the caller's thread. Leaving early cancels the rest. Raises LLMError."""
        for answers in self._jobs_in_order():
            while not answers.is_done:
                yield from answers.read()

    def _jobs_in_order(self) -> Iterator[JobOutputs]:
        """Yields the jobs in order and keeps several in flight."""
        left, begun = deque(self._jobs), deque[JobOutputs]()
        try:
            while left or begun:
                while left and len(begun) < 2:
                    begun.append(self._engine.wait(self._begin(*left.popleft())))
                yield begun[0]
                begun.popleft()
        finally:
            for answers in begun:
                answers.close()

    async def pieces_async(self) -> AsyncIterator[Piece]:
        """Like `pieces`, for a coroutine on the caller's loop."""
        loop = asyncio.get_running_loop()
        begun: JobOutputs | None = None
        try:
            for job in self._jobs:
                begun = await asyncio.wrap_future(self._engine.submit_work(self._begin(*job)))
                while not begun.is_done:
                    for piece in await loop.run_in_executor(self._engine.readers, begun.read):
                        yield piece
        finally:
            if begun is not None:
                begun.close()


def _outputs(answers: Sequence[JobOutputs]) -> list[RequestOutput]:
    """Collects the outputs of all jobs. Raises LLMError if every answer failed."""
    if (error := all_failed(answers)) is not None:
        raise error
    return [output for part in answers for output in part.outputs]


def generate_call(engine: EngineThread, prompts: Sequence[str | list[int]], generate_input: GenerateInput) -> Call:
    """Creates a call that continues prompts. Raises ValueError for both a session and a state."""
    if generate_input.session_id is not None and generate_input.source is not None:
        raise ValueError("give session_id or state, not both")
    return Call(engine, requests_from_prompts, prompts, generate_input)


def chat_call(engine: EngineThread, conversations: Sequence[Any], generate_input: GenerateInput) -> Call:
    return Call(engine, requests_from_conversations, conversations, generate_input)


async def prefill(engine: EngineThread, prompt: str | list[int], source: State | None) -> State:
    _, state = await _read(engine, prompt, source, with_logits=False)
    return state


async def forward(engine: EngineThread, tokens: list[int], source: State | None) -> tuple[bytes, State]:
    """Like `prefill`, with the logits after the last token: [V] fp32, native byte order."""
    output, state = await _read(engine, tokens, source, with_logits=True)
    assert output.logprobs is not None
    (end,) = output.logprobs
    return end.logits, state


async def _read(
    engine: EngineThread, prompt: str | list[int], source: State | None, with_logits: bool
) -> tuple[CompletionOutput, State]:
    """Runs a turn with an empty answer. Returns its output and the state after it."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0 if with_logits else None)
    generate_input = GenerateInput(params, source=source or root(engine))
    (prompt_request,) = await requests_from_prompts(engine.context, [prompt], 0, generate_input)
    sampling = msgspec.structs.replace(prompt_request.row.sampling, logit_bias={END_OF_TEXT: _FORCING_BIAS})
    row = msgspec.structs.replace(prompt_request.row, sampling=sampling, return_logits=with_logits)
    prompt_request = replace(prompt_request, row=row)
    answers = await submit_work(engine.context, [prompt_request], 0, None)
    await answers.wait_finished()
    answers.read()
    (output,) = _outputs([answers])
    assert output.state is not None
    return output.outputs[0], output.state


async def _answer(engine: EngineThread, path: str, body: dict[str, Any]) -> Any:
    """Returns a route's answer. Raises LLMError."""
    reply = await call_handler(engine.context, path, body, client="library", priority=Priority.INTERACTIVE)
    if reply.status != _OK:
        error = reply.value if isinstance(reply.value, dict) else {}
        raise LLMError(reply.reason, status=reply.status, field=error.get("field"), given=error.get("given"))
    return reply.value


async def translate(engine: EngineThread, texts: list[str], source: str, target: str) -> list[str]:
    body = {"text_list": texts, "source_lang": source, "target_lang": target}
    return [one["text"] for one in (await _answer(engine, TRANSLATE, body))["translations"]]


async def score(
    engine: EngineThread, contents: list[str], candidates: list[str] | list[list[str]], logprobs: bool
) -> list[list[Score]]:
    body = {"contents": contents, "candidates": candidates, "logprobs": logprobs}
    scores = (await _answer(engine, SCORE, body))["scores"]
    return [msgspec.convert(content["candidates"], list[Score]) for content in scores]


async def sessions(engine: EngineThread) -> dict[str, str]:
    """Returns the sessions, newest first, with the tier of each state."""
    page = await call_engine(engine.context, ListSessions(_MAX_SESSIONS, 0))
    return {entry.session_id: CACHE_LEVELS[entry.tier] for entry in page.sessions if not is_state(entry.session_id)}


async def delete_session(engine: EngineThread, session_id: str) -> bool:
    """Deletes a session. Returns whether it existed."""
    count = await call_engine(engine.context, DeleteSessions(session_id))
    return count > 0


async def save_session(engine: EngineThread, session_id: str, path: str | Path) -> None:
    content = await call_engine(engine.context, ExportSession(session_id))
    await asyncio.to_thread(Path(path).write_bytes, content)


async def load_session(engine: EngineThread, session_id: str, path: str | Path) -> int:
    """Creates a session from a file. Returns its number of tokens."""
    content = await asyncio.to_thread(Path(path).read_bytes)
    return await call_engine(engine.context, ImportSession(session_id, content))
