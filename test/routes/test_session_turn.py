"""A turn's prompt is tokenised once. Its ids are those of the whole text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from routes.config import HttpConfig
from routes.request import prompts
from routes.request.jobs import as_turn, build_rows
from routes.state import TurnBody
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams

TEXTS = [
    "User: hi\n\nAssistant:",
    "\nUser: hi",
    " x",
    "\n\nUser: hi",
    "\n\n\nUser",
    "你好",
    "\t\n",
    "\r\n a",
    "0",
    "é" * 9,
]
LONG = "The river ran past the mill. " * 40


class Counting(Tokenizer):
    """Records the length of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)


def turn_of(
    text: str, tokenizer: Tokenizer, pad_zero: bool = False, resume: str | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids for a new session and for an existing one."""
    body = TurnBody(contents=[text], session_id="s", pad_zero=pad_zero)
    context = SimpleNamespace(tokenizer=tokenizer, config=HttpConfig())
    rows = build_rows(tokenizer, context.config, body, [text], [], "contents")
    [row] = asyncio.run(as_turn(context, rows, text, "s", text if resume is None else resume, "contents[0]"))  # type: ignore[arg-type]
    assert row.session is not None and isinstance(row.sampling, SamplingParams)
    return row.prompt, row.session.resume_prompt


@pytest.mark.parametrize("text", [*TEXTS, LONG])
@pytest.mark.parametrize("pad_zero", [False, True])
def test_the_ids_are_those_of_the_whole_text(text: str, pad_zero: bool) -> None:
    tokenizer = Tokenizer()
    prompt, resume = turn_of(text, tokenizer, pad_zero)
    assert prompt == [0] * pad_zero + tokenizer.encode(text)
    assert resume == tokenizer.encode(prompts.continuation_prompt(text))


def test_a_long_prompt_is_tokenised_once() -> None:
    tokenizer = Counting()
    turn_of(LONG, tokenizer)
    assert [length for length in tokenizer.lengths if length >= len(LONG)] == [len(LONG)]


def test_another_text_for_an_existing_session_is_encoded() -> None:
    tokenizer = Tokenizer()
    assert turn_of(LONG, tokenizer, resume="User: bye")[1] == tokenizer.encode("\n\nUser: bye")
