"""`AsyncLLM`: LLM for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from programs.library import calls
from programs.library.llm import LLM
from programs.library.outputs import Piece, RequestOutput, Score, State
from programs.library.params import SamplingParams, merge_params
from programs.library.prompt_requests import GenerateInput, Message, Prompt, as_conversations, as_prompts, as_texts

Result = TypeVar("Result")


class AsyncLLM:
    """An LLM with coroutine methods for any event loop. A cancelled call cancels its rows."""

    def __init__(self, model: str | Path | LLM | None = None, **settings: Any) -> None:
        """Loads a model like LLM, or wraps an LLM. Loading blocks: use `await asyncio.to_thread(AsyncLLM, ...)`."""
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(self.llm.engine.submit_work(work))

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        state: State | None = None,
        **params: Any,
    ) -> list[RequestOutput]:
        """See LLM.generate."""
        generate_input = GenerateInput(merge_params(sampling_params, params), False, session_id, state)
        return await self._run(calls.generate_call(self.llm.engine, as_prompts(prompts), generate_input).all_outputs())

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        state: State | None = None,
        **params: Any,
    ) -> AsyncIterator[Piece]:
        """See LLM.generate with `stream`: `async for piece in llm.stream(…)`."""
        generate_input = GenerateInput(merge_params(sampling_params, params), True, session_id, state)
        return calls.generate_call(self.llm.engine, as_prompts(prompts), generate_input).pieces_async()

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        enable_think: bool = False,
        **params: Any,
    ) -> list[RequestOutput]:
        """See LLM.chat."""
        generate_input = GenerateInput(merge_params(sampling_params, params), False, session_id, think=enable_think)
        call = calls.chat_call(self.llm.engine, as_conversations(messages), generate_input)
        return await self._run(call.all_outputs())

    def chat_stream(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        enable_think: bool = False,
        **params: Any,
    ) -> AsyncIterator[Piece]:
        """See LLM.chat with `stream`."""
        generate_input = GenerateInput(merge_params(sampling_params, params), True, session_id, think=enable_think)
        return calls.chat_call(self.llm.engine, as_conversations(messages), generate_input).pieces_async()

    async def translate(self, texts: str | Sequence[str], source: str = "auto", target: str = "en") -> list[str]:
        """See LLM.translate."""
        return await self._run(calls.translate(self.llm.engine, as_texts(texts), source, target))

    async def score(
        self, contents: str | Sequence[str], candidates: Any, *, logprobs: bool = False
    ) -> list[list[Score]]:
        """See LLM.score."""
        return await self._run(calls.score(self.llm.engine, as_texts(contents), candidates, logprobs))

    async def prefill(self, prompt: str | list[int], *, state: State | None = None) -> State:
        """See LLM.prefill."""
        return await self._run(calls.prefill(self.llm.engine, prompt, state))

    async def close(self) -> None:
        """See LLM.close."""
        await asyncio.to_thread(self.llm.close)
