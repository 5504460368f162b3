"""Log-probabilities of given text over HTTP, compared with a separate forward pass."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from routes.openai.logprobs import ContentLogprobs
from routes.response.answer_parser import AnswerFormat, AnswerParser
from routes.response.event_stream import RowDecoder
from rwkv_batch.request import TokenLogprob
from test.harness import TOKENIZER
from test.logprob_oracle import LogprobOracle

TOLERANCE = 1e-4
TEXTS = ["The cat sat.", "Hi", "猫が好き、犬も。", "def f(x):\n    return x\n\n" * 30]
IDS = [TOKENIZER.encode(text) for text in TEXTS]
MODEL = "rwkv7"


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> LogprobOracle:
    return LogprobOracle(tiny_model)


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    request_fields = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **fields}
    return client.completions.create(**request_fields)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [(TEXTS, IDS), (IDS, IDS), (TEXTS[2], IDS[2:3]), (IDS[0], IDS[:1])],
    ids=["texts", "lists of ids", "text", "ids"],
)
def test_prompts_in_every_form(client: OpenAI, oracle: LogprobOracle, prompt: Any, ids: list[list[int]]) -> None:
    answer = complete(client, prompt)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for choice, tokens in zip(answer.choices, ids, strict=True):
        text = TOKENIZER.decode_bytes(tokens).decode()
        logprobs = choice.logprobs
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0], logprobs.text_offset[0]) == (None, None, 0)
        assert logprobs.token_logprobs[1:] == pytest.approx(oracle.token_logprobs(tokens), abs=TOLERANCE)
        for token, likeliest in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert len(likeliest) == 1 and token <= max(likeliest.values())
        starts = [len(TOKENIZER.decode_bytes(tokens[:i]).decode("utf-8", "ignore")) for i in range(len(tokens))]
        assert logprobs.text_offset == starts
        assert all(
            text.startswith(token, at) for token, at in zip(logprobs.tokens, starts, strict=True) if token.isascii()
        )


def test_scoring_a_prompt_does_not_change_the_answer(client: OpenAI) -> None:
    fields = {"max_tokens": 5, "temperature": 0, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    plain = complete(client, TEXTS[0], echo=False, **fields).choices[0]
    echoed = complete(client, TEXTS[0], **fields).choices[0]
    assert echoed.text == TEXTS[0] + plain.text
    assert echoed.logprobs.tokens[len(IDS[0]) :] == plain.logprobs.tokens
    assert echoed.logprobs.token_logprobs[len(IDS[0]) :] == pytest.approx(plain.logprobs.token_logprobs, abs=TOLERANCE)
    assert [at - len(TEXTS[0]) for at in echoed.logprobs.text_offset[len(IDS[0]) :]] == plain.logprobs.text_offset


def test_a_stream_has_the_same_log_probabilities(client: OpenAI) -> None:
    fields = {"max_tokens": 4, "n": 2, "seed": 3, "extra_body": {"ignore_eos": True}}
    whole = complete(client, TEXTS[2:], **fields).choices
    rows: dict[int, dict[str, Any]] = {}
    for chunk in complete(client, TEXTS[2:], stream=True, **fields):
        for choice in chunk.choices:
            row = rows.setdefault(choice.index, {"text": "", "token_logprobs": [], "tokens": [], "text_offset": []})
            row["text"] += choice.text
            for name in ("token_logprobs", "tokens", "text_offset"):
                row[name] += getattr(choice.logprobs, name) if choice.logprobs else []
    for choice in whole:
        row = rows[choice.index]
        assert row["text"] == choice.text
        assert row["tokens"] == choice.logprobs.tokens
        assert row["text_offset"] == choice.logprobs.text_offset
        assert row["token_logprobs"][0] is None
        assert row["token_logprobs"][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=TOLERANCE)


def test_an_echo_that_ends_within_a_character(client: OpenAI) -> None:
    first, second = (TOKENIZER.encode_bytes(bytes([byte])) for byte in "é".encode())
    (choice,) = complete(client, first, max_tokens=1, temperature=0, logit_bias={str(second[0]): 100}).choices
    assert (choice.text, choice.logprobs.text_offset) == ("é", [0, 0])


def test_the_arrays_have_the_form_for_lm_evaluation_harness(client: OpenAI, oracle: LogprobOracle) -> None:
    """Its `local-completions` requests one token more than it scores. It takes [context:-1] of every array."""
    for ids in IDS:
        context = max(1, len(ids) // 2)
        request_fields = {"max_tokens": 1, "temperature": 0, "seed": 1234}
        (choice,) = complete(client, [ids], **request_fields).choices
        part = choice.logprobs.token_logprobs[context:-1]
        assert sum(part) == pytest.approx(sum(oracle.token_logprobs(ids, context)), abs=TOLERANCE * len(ids))
        best = [int(row.argmax()) for row in oracle.logprobs(ids)[context - 1 : -1]]
        tops = [max(likeliest.values()) for likeliest in choice.logprobs.top_logprobs[context:-1]]
        assert [one == two for one, two in zip(part, tops, strict=True)] == [
            one == two for one, two in zip(best, ids[context:], strict=True)
        ]


def test_the_stop_token_has_a_log_probability(client: OpenAI) -> None:
    """Otherwise clients that drop the last entry would drop a prompt token."""
    (choice,) = complete(client, [IDS[0]], max_tokens=1, temperature=0, logit_bias={"0": 100}).choices
    assert (choice.finish_reason, choice.text, len(choice.logprobs.tokens)) == ("stop", TEXTS[0], len(IDS[0]) + 1)


def test_the_best_of_several(client: OpenAI) -> None:
    fields = {"max_tokens": 8, "seed": 11, "temperature": 1.5, "extra_body": {"ignore_eos": True, "top_k": 0}}
    sampled = complete(client, ["The", "A"], echo=False, n=5, **fields)
    best = complete(client, ["The", "A"], echo=False, n=2, best_of=5, **fields)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == sampled.usage.completion_tokens == 80
    for prompt in (0, 1):
        rows = sampled.choices[5 * prompt :][:5]
        order = sorted(rows, key=lambda row: -math.fsum(row.logprobs.token_logprobs))
        assert [row.text for row in best.choices[2 * prompt :][:2]] == [row.text for row in order[:2]]
    without_logprobs = complete(client, ["The", "A"], echo=False, n=2, best_of=5, **{**fields, "logprobs": None})
    assert [row.text for row in without_logprobs.choices] == [row.text for row in best.choices]
    assert all(row.logprobs is None for row in without_logprobs.choices)


def test_fill_in_the_middle_accepts_token_ids(client: OpenAI) -> None:
    fields = {"suffix": "): pass", "max_tokens": 6, "temperature": 0, "echo": False, "logprobs": None}
    text = complete(client, "def f(", **fields)
    ids = complete(client, TOKENIZER.encode("def f("), **fields)
    assert ids.usage.prompt_tokens == text.usage.prompt_tokens
    assert ids.choices[0].text == text.choices[0].text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"session_id": "scored"}}, "echo"),
        ({"echo": False, "extra_body": {"session_id": "read only"}}, "max_tokens"),
        ({"prompt": [IDS[3] * 100], "n": 40, "logprobs": 20}, "logprobs"),
        ({"best_of": 3, "n": 1, "stream": True}, "best_of"),
    ],
)
def test_invalid_scoring_requests_are_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, **{"prompt": TEXTS[0], **fields})
    assert refusal.value.param == param


def test_prompt_logprobs_as_vllm_returns_them(client: OpenAI, oracle: LogprobOracle) -> None:
    fields = {"model": MODEL, "prompt": TEXTS, "max_tokens": 2, "n": 2, "extra_body": {"prompt_logprobs": 2}}
    for index, choice in enumerate(client.completions.create(**fields).choices):
        ids = IDS[index // 2]
        first, *entries = choice.prompt_logprobs
        assert first is None and choice.logprobs is None
        values = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
        assert values == pytest.approx(oracle.token_logprobs(ids), abs=TOLERANCE)
        for entry, token in zip(entries, ids[1:], strict=True):
            ranks = [one["rank"] for one in entry.values()]
            assert sorted(rank for rank in ranks if rank) == [1, 2] and len(entry) in (2, 3)
            assert entry[str(token)]["decoded_token"] in (
                TOKENIZER.decode_bytes([token]).decode("utf-8", "replace"),
            ) or (entry[str(token)]["decoded_token"].startswith("bytes:"))


def test_prompt_logprobs_of_a_conversation(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, n=2, extra_body={"prompt_logprobs": 0}
    )
    first, *entries = answer.prompt_logprobs
    assert first is None and len(entries) == answer.usage.prompt_tokens - 1
    assert all(len(entry) == 1 for entry in entries)


@pytest.mark.parametrize("other", [{"stream": True}, {"echo": True}, {"suffix": "x"}, {"session_id": "s"}])
def test_prompt_logprobs_refuses_what_it_cannot_do(client: OpenAI, other: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match=f"cannot be combined with {next(iter(other))}"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"prompt_logprobs": 1, **other})


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
