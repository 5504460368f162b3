"""Every path of a client's or the model's text takes linear time.

The texts have 100,000 letters (400,000 in `make test-long`) and are the worst case of patterns with lookahead.
Each runs in a process that is killed after some seconds of CPU time. A quadratic path would take an hour.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from test.conftest import IS_LONG
from test.resource_limits import run_bounded

pytestmark = pytest.mark.slow

LETTERS = 400_000 if IS_LONG else 100_000
TEXTS = {
    "spaces": " " * LETTERS,
    "newlines": "\n" * LETTERS,
    "one newline among spaces": " " * (LETTERS // 2) + "\n" + " " * (LETTERS // 2),
    "spaced newlines": " \n" * (LETTERS // 2),
    "tabs and letters": "\t\t\ta" * (LETTERS // 4),
    "paragraphs": "a\n\n" * (LETTERS // 3),
    "carriage returns": "\r\n \r" * (LETTERS // 4),
    "labels": "\nAa Aa Aa Aa" * (LETTERS // 12),
    "tags": "<think></think" * (LETTERS // 14),
    "half tags": "</th" * (LETTERS // 4),
    "flowers": "✿middle" * (LETTERS // 7),
    "quotes": '\\"' * (LETTERS // 2),
    "digits": "9" * LETTERS,
    "han": "國国" * (LETTERS // 2),
    "sharp s": "ß" * LETTERS,
    "surrogates": "\ud800" * (LETTERS // 4),
}


def translate(text: str) -> None:
    """Split a translation and join it, with language detection."""
    from routes.translation.translator import clean_answer
    from rwkv_batch.translation.markers import Format, MarkerOptions, TooManyMarkersError
    from rwkv_batch.translation.plan import (
        AUTO,
        TooManySegmentsError,
        TranslationCache,
        TranslationPlan,
        TranslationRequest,
    )
    from rwkv_batch.translation.segments import Split

    for source, form, split in (
        (AUTO, Format.TEXT, Split.NEWLINES),
        *product(("en",), Format, (Split.NEWLINES, Split.WRAPPED)),
    ):
        options = MarkerOptions(form, ("term",))
        asked = TranslationRequest(texts=[text], source=source, target="eo", split=split, markers=options)
        with suppress(TooManySegmentsError, TooManyMarkersError):
            made = TranslationPlan(asked, 4096, TranslationCache(4))
            while queries := made.missing():
                made.add_answers({query: clean_answer(query.text) for query in queries})
            made.results()
    clean_answer(text)


def prompts_of(text: str) -> None:
    """Build prompts: a conversation, a gap, a session's turn, a translation."""
    from routes.request import prompts
    from routes.request.messages import Message
    from rwkv_batch.translation.plan import Query
    from rwkv_batch.translation.prompts import shared_prompt, translation_prompt

    turns = [Message(role=role, content=text) for role in ("system", "user", "tool", "assistant", "user")]  # type: ignore[arg-type]
    prompts.chat(turns, prompts.Think.LONG)
    prompts.new_messages(turns)
    prompts.continuation_prompt(text)
    prompts.fill_in_the_middle(text, text)
    translation_prompt(Query("en", "zh", text))
    shared_prompt(Query("en", "zh", "", text))


def thoughts(text: str) -> None:
    """Parse an answer in small pieces, with and without reasoning."""
    from routes.response.answer_parser import ReasoningParser

    for thinks, begins in ((True, ""), (True, ">x"), (False, "")):
        parser = ReasoningParser(thinks)
        parser.feed(begins, final=False)
        for start in range(0, len(text), 2):
            parser.feed(text[start : start + 2], final=False)
        parser.feed("", final=True)


def answers(text: str) -> None:
    """Decode the engine's bytes in small pieces, as text and OpenAI's tokens."""
    from routes.openai.logprobs import LogprobArrays
    from routes.response.event_stream import RowDecoder
    from rwkv_batch.request import TokenLogprob

    data = text.encode("utf-8", "surrogatepass")
    step = 31
    row = RowDecoder("opening", strip=True)
    for start in range(0, len(data), step):
        row.feed(data[start : start + step], final=False)
    row.feed(b"", final=True)
    LogprobArrays().take([TokenLogprob(data[start : start + step], -1.0, []) for start in range(0, len(data), step)])


def bodies(text: str) -> None:
    """Parse a body with the text, and one that is the text. Also build the errors of both."""
    import json

    from routes.openai.request import ChatBody
    from routes.request.bodies import PromptBody
    from routes.request.json_body import parse_json, validate
    from routes.translation.batch_translate import TranslateBody
    from rwkv_batch.errors import ServiceError

    forms = {
        ChatBody: {"messages": [{"role": text, "content": text}], "stop": text, "logit_bias": {text: 1}},
        PromptBody: {"contents": [text], "session_id": text, "model": text},
        TranslateBody: {"source_lang": text, "target_lang": text, "text_list": [text]},
    }
    for model, form in forms.items():
        for raw in (json.dumps(form).encode(), text.encode("utf-8", "surrogatepass")):
            try:
                validate(model, parse_json(raw, 9))
            except ServiceError as error:
                assert len(error.info.message) + len(str(error.info.given)) < 2000


def tokens(text: str) -> None:
    """Encode a prompt within the limit and far above it."""
    from routes.config import HttpConfig
    from routes.request.jobs import encode
    from rwkv_batch.errors import ServiceError
    from rwkv_batch.tokenizer import Tokenizer

    text = text.encode("utf-8", "replace").decode()
    for limit in (1000, 4 * LETTERS):
        try:
            encode(Tokenizer(), text, "contents[0]", HttpConfig(max_prompt_tokens=limit))
        except ServiceError as error:
            assert "--max-prompt-tokens" in error.info.message


PATHS: tuple[Callable[[str], None], ...] = (translate, prompts_of, answers, bodies, tokens)


def all_texts(path: Callable[[str], None], names: list[str], times: int) -> list[str]:
    """Run the texts on this path. Return the names of the finished ones."""
    return [name for name in names if path(TEXTS[name] * times) is None]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_time_is_linear_in_the_text(path: Callable[[str], None]) -> None:
    cost = run_bounded(all_texts, path, list(TEXTS), 1, cpu_s=60 if IS_LONG else 30)  # a slow machine takes half of it
    assert cost.result == list(TEXTS), f"killed: exit code {cost.exit_code}"


def test_time_is_linear_in_the_reasoning() -> None:
    """Use fewer but longer texts. Text copied again with every piece is cheap per letter."""
    names = ["spaces", "half tags"]
    cost = run_bounded(all_texts, thoughts, names, 3)
    assert cost.result == names, f"killed: exit code {cost.exit_code}"


def test_paragraphs_are_split_by_the_definition() -> None:
    """Compare with the definition: the longest white space with two newlines and no letter between them."""
    from rwkv_batch.translation.markers import MarkerOptions
    from rwkv_batch.translation.segments import Split, split_text

    border = re.compile(r"\s*\n[^\S\n]*\n\s*")
    dice = random.Random(11)
    for _ in range(20_000):
        text = "".join(dice.choice("ab \n\n\t\r\u3000\x1c") for _ in range(dice.randrange(14)))
        pieces: list[Any] = list(split_text(text, MarkerOptions(), Split.NONE, "en"))
        said = [piece.text for piece in pieces if not isinstance(piece, str)]
        assert said == [part.strip() for part in border.split(text) if part.strip()], repr(text)
        assert "".join(piece if isinstance(piece, str) else piece.text for piece in pieces) == text
