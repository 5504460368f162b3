"""`LLM`: an engine in this process, with vLLM's interface. Every flag of the command is an argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

import msgspec

from native.files import TemporaryFolder
from programs.backends.local_engine import LocalEngine
from programs.library import calls
from programs.library.arguments import command_line_of, library_message
from programs.library.engine_thread import EngineThread
from programs.library.outputs import Piece, RequestOutput, Score, State
from programs.library.params import LLMError, SamplingParams, merge_params
from programs.library.prompt_requests import GenerateInput, Message, Prompt, as_conversations, as_prompts, as_texts
from programs.settings import Settings, SettingsError, parse_settings
from programs.settings.model_file import with_default_model
from rwkv_batch.errors import StartupError
from rwkv_batch.tokenizer import Tokenizer

_UNBOUNDED = 2**31 - 1


def start_engine(given: Mapping[str, Any]) -> EngineThread:
    """Starts an engine. Arguments win over RWKV_... variables, which win over defaults.

    Without `state_db`, sessions live as long as the engine. Raises TypeError, ValueError or LLMError.
    """
    folder = None
    if given.get("state_db") is None:
        folder = TemporaryFolder("library")
        given = {**given, "state_db": f"{folder.path}/sessions.db", "durability": given.get("durability") or "lazy"}
    try:
        settings = with_default_model(parse_settings(command_line_of(given), os.environ))
        engine = EngineThread(LocalEngine(_without_client_limits(settings), stores_sessions=True), folder)
        folder = None  # the engine owns it
        return engine
    except SettingsError as error:
        raise ValueError(library_message(str(error))) from None
    except StartupError as error:
        raise LLMError(str(error)) from None
    finally:
        if folder is not None:
            folder.remove()


Callback = Callable[[Piece], None]


def _without_client_limits(settings: Settings) -> Settings:
    http = msgspec.structs.replace(
        settings.http,
        max_contents=_UNBOUNDED,
        max_prompt_tokens=_UNBOUNDED,
        max_request_tokens=_UNBOUNDED,
        stall_timeout_s=float(_UNBOUNDED),
    )
    engine = msgspec.structs.replace(
        settings.engine, max_waiting_rows=_UNBOUNDED, max_waiting_rows_per_client=_UNBOUNDED
    )
    return msgspec.structs.replace(settings, http=http, engine=engine)


class LLM:
    """A loaded model. Thread-safe. Concurrent calls run in one batch."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | None = None,
        devices: str | Sequence[str | int] | None = None,
        strategy: str | None = None,
        **settings: Any,
    ) -> None:
        """Loads a model. None: the demo model. `settings`: any flag of docs/settings.md, e.g. max_running=64.

        Raises TypeError for an unknown argument, ValueError for an invalid setting, LLMError if the model cannot be
        served.
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
        """Continues one prompt or many (texts or token ids). Outputs are in the order of the prompts.

        sampling_params: or its fields as arguments.
                stream: return an iterator of pieces instead. `callback` gets every piece, and the outputs are returned.
                session_id: the prompt continues that session.
                state: every prompt continues from it. It does not change. `output.state` is the new state.
        Raises LLMError if every prompt failed. Otherwise failed outputs have an `error`. Raises TypeError for wrong
                arguments.
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
        """Answers one conversation or several in the model's chat form. See `generate` for the arguments.

        enable_think: the model thinks first. The thought is in `reasoning`.
                session_id: an existing session reads only the messages after the last answer.
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
                raise ValueError("give stream or callback, not both")
            return call.pieces()
        return self.engine.wait(call.all_outputs()) if callback is None else call.run_with_callback(callback)

    # Other questions ---------------------------------------------------------------------------------------------

    def translate(self, texts: str | Sequence[str], source: str = "auto", target: str = "en") -> list[str]:
        """Returns the translations in the order of the texts. Languages: ISO code or name. Raises LLMError."""
        return self.engine.wait(calls.translate(self.engine, as_texts(texts), source, target))

    def score(
        self,
        contents: str | Sequence[str],
        candidates: Sequence[str] | Sequence[Sequence[str]],
        *,
        logprobs: bool = False,
    ) -> list[list[Score]]:
        """Scores candidates after each content. Candidates: one list for all contents, or one list per content.

        logprobs: return the tokens' log-probabilities too. Raises LLMError.
        """
        return self.engine.wait(calls.score(self.engine, as_texts(contents), list(candidates), logprobs))  # type: ignore[arg-type]  # validated there

    # States and sessions -----------------------------------------------------------------------------------------

    def prefill(self, prompt: str | list[int], *, state: State | None = None) -> State:
        """Reads a prompt after `state`, if given, and returns the new state. Raises LLMError."""
        return self.engine.wait(calls.prefill(self.engine, prompt, state))

    def load_state(self, path: str | Path) -> State:
        """Loads a state that `State.save` wrote for the same model. Raises LLMError or OSError."""
        return self.engine.wait(State.load(self.engine, path))

    def sessions(self) -> dict[str, str]:
        """Returns the sessions, newest first, with the tier of each state. Raises LLMError."""
        return self.engine.wait(calls.sessions(self.engine))

    def delete_session(self, session_id: str) -> bool:
        """Deletes a session. Returns whether it existed. Raises LLMError."""
        return self.engine.wait(calls.delete_session(self.engine, session_id))

    def save_session(self, session_id: str, path: str | Path) -> None:
        """Writes a session to a file, like `/state/export`. Raises LLMError or OSError."""
        self.engine.wait(calls.save_session(self.engine, session_id, path))

    def load_session(self, session_id: str, path: str | Path) -> int:
        """Creates a session from a file. Returns its number of tokens. Raises LLMError or OSError."""
        return self.engine.wait(calls.load_session(self.engine, session_id, path))

    # The rest ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer: `encode` and `decode_bytes`."""
        return self.engine.context.tokenizer

    def close(self) -> None:
        """Ends the engine. Cancels running rows and drops all in memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
