"""Stops on ids and strings, across tokens; what is shown, held back and kept for a session."""

from __future__ import annotations

import random

import pytest

from rwkv_batch.core.output import RowOutput, StopRules
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, TokenLogprob
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams

TOKENIZER = Tokenizer()
TABLE = TOKENIZER.byte_table
DONE = Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=0)


def request(**fields: object) -> GenerateRequest:
    given = {"prompt": [1], "max_tokens": 1000, "sampling": SamplingParams(), "chunk_size": 1, **fields}
    return GenerateRequest(**given)  # type: ignore[arg-type]


def run(tokens: list[int], **fields: object) -> tuple[bytes, FinishReason | None, RowOutput, list[Delta]]:
    """Feed tokens until the row ends; returns the shown text, the reason, the output and its deltas."""
    asked = request(**fields)
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    deltas = []
    reason = None
    for token in tokens:
        reason = output.push(token)
        if reason is not None:
            break
        if (delta := output.take_delta()) is not None:
            deltas.append(delta)
    output.give_up_holding()
    last = output.take_delta(DONE)
    assert last is not None
    deltas.append(last)
    return b"".join(delta.text for delta in deltas), reason, output, deltas


def spell(text: str) -> list[int]:
    """One token a byte: the worst case for everything that crosses tokens."""
    return [byte + 1 for byte in text.encode()]


def test_end_token_always_stops_and_is_never_shown() -> None:
    text, reason, output, _ = run([*spell("ab"), 0, *spell("cd")])
    assert (text, reason) == (b"ab", FinishReason.STOP)
    assert output.shown_tokens() == (spell("ab"), b"")


def test_ignore_eos_also_drops_it_from_the_stop_ids() -> None:
    text, reason, _, _ = run([*spell("ab"), 0, *spell("cd")], ignore_eos=True, stop_ids=[0])
    assert (text, reason) == (b"abcd", None)


def test_stop_id_is_not_shown() -> None:
    text, reason, output, _ = run([*TOKENIZER.encode("Hello"), 24281], stop_ids=[24281])
    assert (text, reason) == (b"Hello", FinishReason.STOP)
    assert output.tokens[-1] == 24281


@pytest.mark.parametrize("chunk_size", [0, 1, 3, 100])
def test_stop_string_across_tokens(chunk_size: int) -> None:
    text, reason, output, _ = run(spell("one STOP two"), stop_strings=[b"STOP"], chunk_size=chunk_size)
    assert (text, reason) == (b"one ", FinishReason.STOP)
    assert output.shown_tokens() == (spell("one "), b"")
    assert len(output.tokens) == len("one STOP")


def test_half_a_stop_is_shown_in_the_end() -> None:
    assert run(spell("one STO"), stop_strings=[b"STOP"], max_tokens=7)[:2] == (b"one STO", FinishReason.LENGTH)


def test_overlapping_beginnings() -> None:
    assert run(spell("aaab"), stop_strings=[b"aab"])[0] == b"a"
    assert run(spell("ababac"), stop_strings=[b"abac"])[0] == b"ab"


def test_blank_line_hidden_in_merged_tokens() -> None:
    """`。\\n\\n` is [28329, 11]: the stop id 261 is never drawn, its text is."""
    text, reason, output, _ = run([10000, 28329, 11, 10000], stop_ids=[261])
    assert (text, reason) == (TABLE[10000] + "。".encode(), FinishReason.STOP)
    assert output.shown_tokens() == ([10000], "。".encode())


def test_held_text_names_its_first_token() -> None:
    asked = request(stop_strings=[b"xyz"])
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    for token in spell("abx"):
        output.push(token)
    assert output.is_holding and output.first_held_token() == 2
    output.push(spell("q")[0])
    assert not output.is_holding


def test_chunks_gather_tokens() -> None:
    _, _, _, deltas = run(spell("abcdefgh"), chunk_size=3)
    assert [delta.num_tokens for delta in deltas] == [3, 3, 2]
    assert [delta.text for delta in deltas] == [b"abc", b"def", b"gh"]


def test_random_texts_against_plain_search() -> None:
    rng = random.Random(7)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(1, 40)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        shown, reason, output, _ = run(
            TOKENIZER.encode(text), stop_strings=[s.encode() for s in stops], chunk_size=rng.choice([0, 1, 4])
        )
        # The earliest end of a stop decides; of those that end with the same token, the earliest beginning.
        wanted = _plain_search(TOKENIZER.encode(text), stops)
        assert shown.decode() == wanted
        assert (reason is FinishReason.STOP) == (wanted != text or any(s in text for s in stops))
        whole, partial = output.shown_tokens()
        assert TOKENIZER.decode_bytes(whole) + partial == shown


def _plain_search(tokens: list[int], stops: list[str]) -> str:
    text = ""
    for token in tokens:
        text += TABLE[token].decode()
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)]
    return text


def test_log_probabilities_are_of_shown_tokens_only() -> None:
    asked = request(stop_strings=[b"cd"], chunk_size=1)
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    told: list[bytes] = []
    for token in [*spell("ab"), *spell("c"), *spell("d")]:
        reason = output.push(token, TokenLogprob(TABLE[token], -1.0, []))
        delta = output.take_delta(DONE if reason else None)
        told += [entry.token for entry in (delta.logprobs or [])] if delta else []
    assert told == [b"a", b"b"]
