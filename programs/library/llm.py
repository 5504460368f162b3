"""`LLM`: an engine in this process, in vLLM's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from programs.library import calls
from programs.library.configure import start_engine
from programs.library.outputs import Piece, RequestOutput, Score
from programs.library.params import SamplingParams, merge_params
from programs.library.prompt_requests import (
    GenerateInput,
    Message,
    Prompt,
    as_conversations,
    as_prompts,
    as_texts,
)
from programs.library.states import State
from rwkv_batch.tokenizer import Tokenizer

Callback = Callable[[Piece], None]


class LLM:
    """A model, loaded; any thread may call it, and what is asked at a time runs in one batch."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | None = None,
        devices: str | Sequence[str | int] | None = None,
        strategy: str | None = None,
        **settings: Any,
    ) -> None:
        """Loads the model; None: the demo's. `settings`: any flag of docs/settings.md by its name (max_running=64).

        Raises ValueError for a setting that cannot be used, LLMError for a model that cannot be served.
        """
        named = {"model": model, "dtype": dtype, "devices": devices, "strategy": strategy}
        self.engine = start_engine({**named, **settings})

    # Generating --------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        callback: Callback | None = None,
        session_id: str | None = None,
        state: State | None = None,
        **params: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        session_id: str | None = None,
        state: State | None = None,
        **params: Any,
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        callback: Callback | None = None,
        session_id: str | None = None,
        state: State | None = None,
        **params: Any,
    ) -> list[RequestOutput] | Iterator[Piece]:
        """Continue one prompt or many (texts or token ids); outputs in the order of the prompts.

        sampling_params: or its fields as arguments. stream: pieces as they are made instead; `callback` gets each of
        them, and the outputs are returned. session_id: the one prompt continues that session and is folded into it.
        state: every prompt goes on from it and leaves it as it was; `output.state` is what came of it.
        Raises LLMError if every prompt failed; else what failed says so in `error`. TypeError for wrong arguments.
        """
        generate_input = GenerateInput(
            merge_params(sampling_params, params), stream or callback is not None, session_id, state
        )
        return self._respond(calls.generate_call(self.engine, as_prompts(prompts), generate_input), stream, callback)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        callback: Callback | None = None,
        session_id: str | None = None,
        enable_think: bool = False,
        **params: Any,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        session_id: str | None = None,
        enable_think: bool = False,
        **params: Any,
    ) -> Iterator[Piece]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        callback: Callback | None = None,
        session_id: str | None = None,
        enable_think: bool = False,
        **params: Any,
    ) -> list[RequestOutput] | Iterator[Piece]:
        """Answer a conversation, or several at once, in the model's prompt form; arguments are those of `generate`.

        enable_think: let the model think first; the thought is `reasoning`. session_id: only what follows the last
        answer is read, once the session exists.
        """
        generate_input = GenerateInput(
            merge_params(sampling_params, params), stream or callback is not None, session_id, think=enable_think
        )
        call = calls.chat_call(self.engine, as_conversations(messages), generate_input)
        return self._respond(call, stream, callback)

    def _respond(
        self, call: calls.Call, stream: bool, callback: Callback | None
    ) -> list[RequestOutput] | Iterator[Piece]:
        if stream:
            if callback is not None:
                raise ValueError("give stream or callback, not both: a stream's pieces are its caller's")
            return call.pieces()
        return self.engine.wait(call.all_outputs()) if callback is None else call.run_with_callback(callback)

    # Other questions ---------------------------------------------------------------------------------------------

    def translate(self, texts: str | Sequence[str], source: str = "auto", target: str = "en") -> list[str]:
        """Translations in the order of the texts; languages by ISO code or name. Raises LLMError."""
        return self.engine.wait(calls.translate(self.engine, as_texts(texts), source, target))

    def score(
        self,
        contents: str | Sequence[str],
        candidates: Sequence[str] | Sequence[Sequence[str]],
        *,
        logprobs: bool = False,
    ) -> list[list[Score]]:
        """How likely each candidate is behind each content: the same candidates for all, or a list for each.

        logprobs: tell those of single tokens too. Raises LLMError.
        """
        return self.engine.wait(calls.score(self.engine, as_texts(contents), list(candidates), logprobs))  # type: ignore[arg-type]  # validated there

    # States and sessions -----------------------------------------------------------------------------------------

    def prefill(self, prompt: str | list[int], *, state: State | None = None) -> State:
        """Read a prompt, behind `state` if one is given, and keep what the model has read. Raises LLMError."""
        return self.engine.wait(calls.prefill(self.engine, prompt, state))

    def load_state(self, path: str | Path) -> State:
        """The state that `State.save` wrote, for the same model. Raises LLMError, OSError."""
        return self.engine.wait(State.load(self.engine, path))

    def sessions(self) -> dict[str, str]:
        """Names of the sessions that are kept, newest first, and where their states lie. Raises LLMError."""
        return self.engine.wait(calls.sessions(self.engine))

    def delete_session(self, session_id: str) -> bool:
        """Whether there was one. Raises LLMError."""
        return self.engine.wait(calls.delete_session(self.engine, session_id))

    def save_session(self, session_id: str, path: str | Path) -> None:
        """Write a session as a file, as `/state/export` does. Raises LLMError, OSError."""
        self.engine.wait(calls.save_session(self.engine, session_id, path))

    def load_session(self, session_id: str, path: str | Path) -> int:
        """Make a session of a file; returns the tokens that it stands for. Raises LLMError, OSError."""
        return self.engine.wait(calls.load_session(self.engine, session_id, path))

    # The rest ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Text to token ids (`encode`) and back to bytes (`decode_bytes`)."""
        return self.engine.context.tokenizer

    def close(self) -> None:
        """End the engine: rows that still run are cancelled, what it keeps in memory is gone. Twice does no harm."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
