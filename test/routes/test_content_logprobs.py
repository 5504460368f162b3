"""Log-probabilities of an answer's content: their tokens joined are the content, at any cut."""

from __future__ import annotations

import random

import pytest

from routes.openai.logprobs import ContentLogprobs
from routes.response.answer_parser import AnswerFormat, AnswerParser
from routes.response.event_stream import RowDecoder
from rwkv_batch.request import TokenLogprob

CALL = '{"name": "f", "arguments": {"a": "```"}}'
TALK, THINKS = AnswerFormat(), AnswerFormat(thinks=True)
TOOLS, MUST_CALL = AnswerFormat(names=("f",)), AnswerFormat(names=("f",), opens_with_call=True, must_call=True)
THINKS_AND_CALLS = AnswerFormat(thinks=True, names=("f",))
CALLS_OR_TEXT = AnswerFormat(names=("f",), is_calls_or_constrained=True)
CASES = [
    (TALK, " Hello "),
    (TALK, "\n<think>\nHi\n</think>\nHi <think> 你好"),
    (TALK, "<thin air"),
    (TALK, "<thi"),
    (AnswerFormat(is_constrained=True), " \n{} "),
    (THINKS, ">\nHi\n</think>\n\nHi \U0001f600"),
    (THINKS, "> no end </thin"),
    (TOOLS, f" Hi\n\n```json\n{CALL}\n```\n"),
    (TOOLS, f"Hi <tool_call>{CALL}</tool_call> Hi <tool_call>\n{CALL}\n</tool_call>"),
    (TOOLS, f"<tool_call>{CALL}</tool_call>\n Hi"),
    (TOOLS, 'See ```json\n{"name": "g", "arguments": {}}\n``` there '),
    (TOOLS, "See ```json\nno ``<tool_ `"),
    (THINKS_AND_CALLS, f">\nHi ```json </think>\n Hi ```json\n{CALL}"),
    (MUST_CALL, f"{CALL}\n```\n```json\n{CALL}"),
    (CALLS_OR_TEXT, '{"a": "<tool_call>"} '),
]


def cut_at_random(text: str, dice: random.Random) -> list[bytes]:
    """Return tokens: whole characters, or a part of one."""
    tokens = [b""]
    for character in text:
        raw = character.encode()
        if len(raw) > 1 and dice.random() < 0.5:
            at = dice.randrange(1, len(raw))
            tokens += [raw[:at], raw[at:], b""]
        else:
            tokens += [b""] * (dice.random() < 0.4)
            tokens[-1] += raw
    return tokens


@pytest.mark.parametrize(("answer_format", "text"), CASES)
def test_joined_tokens_are_the_content(answer_format: AnswerFormat, text: str) -> None:
    whole = AnswerParser(answer_format).feed(text, True).content
    dice = random.Random(text)
    for _ in range(60):
        tokens = cut_at_random(text, dice)
        parser, decoder, selected = AnswerParser(answer_format), RowDecoder(), ContentLogprobs()
        waiting, content, entries = list(tokens), "", []
        while waiting:
            step = [waiting.pop(0) for _ in range(min(len(waiting), 1 + dice.randrange(3)))]
            parts = parser.feed(decoder.feed(b"".join(step), not waiting), not waiting)
            content += parts.content
            new = selected.feed([TokenLogprob(token, -1.0, []) for token in step], parts, not waiting)
            entries += [entry.token for entry in new]
        assert content == whole
        assert b"".join(entries).decode() == content, tokens
