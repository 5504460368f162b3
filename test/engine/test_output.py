"""Stops on ids and strings, across tokens: shown, held and kept text."""

from __future__ import annotations

import random

import pytest

from rwkv_batch.core.output import RowOutput, StopAutomaton, StopRules, StopRulesCache
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Resumed, TokenLogprob
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import Filters, SamplingParams
from test.conftest import IS_LONG, rest_slow

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
        reason = output.append_token(token)
        if reason is not None:
            break
        if (delta := output.pop_delta()) is not None:
            deltas.append(delta)
    output.flush_held_text()
    last = output.pop_delta(DONE)
    assert last is not None
    deltas.append(last)
    return b"".join(delta.text for delta in deltas), reason, output, deltas


def spell(text: str) -> list[int]:
    """One token per byte: the worst case for matches across tokens."""
    return [byte + 1 for byte in text.encode()]


def test_end_token_always_stops_and_is_never_shown() -> None:
    text, reason, output, _ = run([*spell("ab"), 0, *spell("cd")])
    assert (text, reason) == (b"ab", FinishReason.STOP)
    assert output.shown_tokens() == (spell("ab"), b"")


def test_ignore_eos_also_drops_it_from_the_stop_ids() -> None:
    text, reason, _, _ = run([*spell("ab"), 0, *spell("cd")], ignore_eos=True, stop_ids=[0])
    assert (text, reason) == (b"abcd", None)


@pytest.mark.parametrize("chunk_size", [0, 1, 3])
def test_an_included_stop_ends_the_text_but_not_the_sessions_tokens(chunk_size: int) -> None:
    fields = {"stop_strings": [b"STOP", b"OPS"], "include_stop": True, "chunk_size": chunk_size}
    text, reason, output, _ = run(spell("one STOPS two"), **fields)
    assert (text, reason) == (b"one STOP", FinishReason.STOP)
    assert output.shown_tokens() == (spell("one "), b"")
    assert run([*spell("ab"), 24281], stop_ids=[24281], **fields)[0] == b"abUser"
    assert run([*spell("ab"), 0], **fields)[0] == b"ab"
    assert run([10000, 28329, 11], stop_ids=[261], include_stop=True)[0].endswith("。\n\n".encode())


def test_stops_do_not_end_the_first_tokens() -> None:
    fields = {"stop_strings": [b"ab"], "sampling": SamplingParams(filters=Filters(min_tokens=4))}
    assert run(spell("xabyab"), **fields)[:2] == (b"xaby", FinishReason.STOP)
    assert run(spell("abcabab"), **fields)[0] == b"abcab", "text of the first tokens begins no stop"
    assert run(spell("abab"), max_tokens=4, **fields)[:2] == (b"abab", FinishReason.LENGTH)


def test_stop_id_is_not_shown() -> None:
    text, reason, output, _ = run([*TOKENIZER.encode("Hello"), 24281], stop_ids=[24281])
    assert (text, reason) == (b"Hello", FinishReason.STOP)
    assert output.tokens[-1] == 24281


@pytest.mark.parametrize("return_token_ids", [False, True])
def test_process_token_equals_append_token_and_pop_delta(return_token_ids: bool) -> None:
    dice = random.Random(7)
    for _ in range(300):
        letters = [*spell("abc "), 0, 24281, *TOKENIZER.encode("é\n\n")]
        strings = [bytes(dice.choices(b"ab ", k=dice.choice([2, 3]))) for _ in range(dice.choice([0, 0, 1, 3]))]
        fields = {"stop_strings": strings, "ignore_eos": dice.random() < 0.7, "max_tokens": dice.choice([1, 7, 99])}
        asked = request(**fields, stop_ids=[24281] if dice.random() < 0.3 else [], chunk_size=dice.choice([0, 1, 3]))
        one, two = (RowOutput(2, asked, StopRules(asked, TABLE), TABLE, return_token_ids) for _ in range(2))
        reason = None
        while reason is None:
            token = dice.choice(letters)
            logprob = TokenLogprob(TABLE[token], -1.0, []) if dice.random() < 0.2 else None
            reason = two.append_token(token, logprob)
            assert one.process_token(token, logprob) == (two.pop_delta() if reason is None else reason)
            assert (
                one.has_held_text == two.has_held_text and one.first_held_token() == two.first_held_token()
            ) or reason
            if len(two.tokens) == 40:
                break
        assert one.pop_delta(DONE) == two.pop_delta(DONE) and one.shown_tokens() == two.shown_tokens()


@pytest.mark.parametrize("chunk_size", [0, 1, 3, 100])
def test_stop_string_across_tokens(chunk_size: int) -> None:
    text, reason, output, _ = run(spell("one STOP two"), stop_strings=[b"STOP"], chunk_size=chunk_size)
    assert (text, reason) == (b"one ", FinishReason.STOP)
    assert output.shown_tokens() == (spell("one "), b"")
    assert len(output.tokens) == len("one STOP")


@pytest.mark.parametrize(("last", "reason"), [(24281, FinishReason.STOP), (spell("T")[0], FinishReason.LENGTH)])
def test_held_text_is_shown_with_the_last_token(last: int, reason: FinishReason) -> None:
    asked = request(stop_strings=[b"STOP"], stop_ids=[24281], max_tokens=6)
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    assert [output.append_token(token) for token in [*spell("one S"), last]] == [None] * 5 + [reason]
    shown = b"one S" if reason is FinishReason.STOP else b"one ST"
    delta = output.pop_delta(DONE)
    assert delta is not None
    assert (delta.text, output.shown_tokens()) == (shown, (spell(shown.decode()), b""))
    assert not output.has_held_text


def test_an_incomplete_stop_is_shown_at_the_end() -> None:
    assert run(spell("one STO"), stop_strings=[b"STOP"], max_tokens=7)[:2] == (b"one STO", FinishReason.LENGTH)


def test_overlapping_beginnings() -> None:
    assert run(spell("aaab"), stop_strings=[b"aab"])[0] == b"a"
    assert run(spell("ababac"), stop_strings=[b"abac"])[0] == b"ab"


def test_blank_line_hidden_in_merged_tokens() -> None:
    """`。\\n\\n` is [28329, 11]: the stop id 261 is never sampled, but its text appears."""
    text, reason, output, _ = run([10000, 28329, 11, 10000], stop_ids=[261])
    assert (text, reason) == (TABLE[10000] + "。".encode(), FinishReason.STOP)
    assert output.shown_tokens() == ([10000], "。".encode())


def test_held_text_names_its_first_token() -> None:
    asked = request(stop_strings=[b"xyz"])
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    for token in spell("abx"):
        output.append_token(token)
    assert output.has_held_text and output.first_held_token() == 2
    output.append_token(spell("q")[0])
    assert not output.has_held_text


def test_a_delta_names_its_row_and_tokens() -> None:
    asked = request(chunk_size=2)
    output = RowOutput(3, asked, StopRules(asked, TABLE), TABLE, return_token_ids=True)
    for token in spell("abc"):
        assert output.append_token(token) is None
    assert output.pop_delta() == Delta(3, b"abc", 3, token_ids=spell("abc"))
    assert output.pop_delta() is None
    output.append_token(spell("d")[0])
    assert output.pop_delta(DONE) == Delta(3, b"d", 1, DONE, token_ids=spell("d"))


def test_tokens_of_another_engine_are_not_sent_again() -> None:
    """Of the held text that it had sent, nothing comes twice; the rest comes with the next delta."""
    for shown, first in ((2, b"STx"), (3, b"Tx"), (4, b"x")):
        asked = request(stop_strings=[b"STOP"], resumed=Resumed(token_ids=spell("abST"), shown=shown))
        output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
        assert (output.tokens, output.pop_delta()) == (spell("abST"), None)
        assert output.append_token(spell("x")[0]) is None
        delta = output.pop_delta()
        assert delta is not None and (delta.text, delta.num_tokens) == (first, 1)


def test_held_text_with_log_probabilities_is_whole_tokens() -> None:
    """Text is sent with its tokens: a token is held if its end is."""
    pieces = ["a", " b", " abc", "d"]
    tokens = [next(token for token, text in enumerate(TABLE) if text == piece.encode()) for piece in pieces]
    asked = request(stop_strings=[b"cde"])
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    texts = []
    for token in tokens:
        assert output.append_token(token, TokenLogprob(TABLE[token], -1.0, [])) is None
        delta = output.pop_delta()
        texts.append(b"" if delta is None else delta.text)
        assert output.has_held_text == (token in tokens[2:])
    assert texts == [b"a", b" b", b"", b""] and output.first_held_token() == 2
    output = RowOutput(0, asked := request(stop_strings=[b"bcd"]), StopRules(asked, TABLE), TABLE)
    output.append_token(tokens[1], TokenLogprob(b" b", -1.0, []))
    delta = output.pop_delta()
    assert delta is None or delta.text == b"", "also the first token"


def test_the_end_token_has_a_log_probability_and_no_text() -> None:
    asked = request(chunk_size=0)
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    entries = [TokenLogprob(TABLE[token], -1.0, []) for token in (*spell("a"), 0)]
    assert output.append_token(spell("a")[0], entries[0]) is None
    assert output.append_token(0, entries[1]) is FinishReason.STOP
    delta = output.pop_delta(DONE)
    assert delta is not None and (delta.text, delta.logprobs) == (b"a", entries)


def test_chunk_size_collects_tokens() -> None:
    _, _, _, deltas = run(spell("abcdefgh"), chunk_size=3)
    assert [delta.num_tokens for delta in deltas] == [3, 3, 2]
    assert [delta.text for delta in deltas] == [b"abc", b"def", b"gh"]


def test_the_stop_string_that_ended_a_text_is_known() -> None:
    strings = [b"b c", b"b c d", b"x", b"a b c"]
    for tokens, stops, found in (
        (spell("z a b c d"), strings, b"a b c"),
        (spell("z b c d"), strings, b"b c"),
        (TOKENIZER.encode("Hello world\n\nUser: x"), [b"\nUser:"], b"\nUser:"),
        (spell("z b"), strings, b""),
        ([*spell("z"), 0], strings, b""),
    ):
        output = run(tokens, stop_strings=stops)[2]
        assert output.matched_stop(stops) == found


def test_random_texts_against_plain_search() -> None:
    rng = random.Random(7)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(1, 40)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        shown, reason, output, _ = run(
            TOKENIZER.encode(text), stop_strings=[s.encode() for s in stops], chunk_size=rng.choice([0, 1, 4])
        )
        # The stop that ends first wins; among those that end in the same token, the one that begins first.
        expected = _plain_search(TOKENIZER.encode(text), stops)
        assert shown.decode() == expected
        assert (reason is FinishReason.STOP) == (expected != text or any(s in text for s in stops))
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


def test_log_probabilities_of_a_whole_text_are_sent_in_chunks() -> None:
    for chunk_size in (0, 65_536):
        asked = request(sampling=SamplingParams(top_logprobs=20), chunk_size=chunk_size, max_tokens=2000)
        output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
        sizes = []
        for token in spell("x" * 1000):
            output.append_token(token, TokenLogprob(b"x", -1.0, []))
            if (delta := output.pop_delta()) is not None:
                sizes.append(len(delta.logprobs or []))
            assert len(output._logprobs) <= 256
        assert sizes == [256] * 3


def test_a_long_whole_text_is_sent_in_a_few_chunks() -> None:
    _, _, _, deltas = run(spell("x" * 10_000), chunk_size=0, max_tokens=20_000)
    assert [delta.num_tokens for delta in deltas] == [4096, 4096, 1808]


def test_a_stop_string_together_with_a_blank_line_stop_id() -> None:
    both: dict[str, object] = {"stop_ids": [261], "stop_strings": [b"STOP"]}
    assert run(spell("one STOP two"), **both)[:2] == (b"one ", FinishReason.STOP)
    assert run(spell("one\n\ntwo"), **both)[:2] == (b"one", FinishReason.STOP)


def test_a_newline_stop_id_does_not_cut_merged_tokens() -> None:
    """Only blank lines are matched as text: `。\n` is a token of its own, and the model did not sample a newline."""
    text, reason, _, _ = run([10000, 28329, 10000, 11], stop_ids=[11])
    assert (text, reason) == (TABLE[10000] + TABLE[28329] + TABLE[10000], FinishReason.STOP)


def test_a_stop_that_the_last_allowed_token_completes_is_a_stop() -> None:
    assert run(spell("one STOP"), stop_strings=[b"STOP"], max_tokens=8)[:2] == (b"one ", FinishReason.STOP)
    assert run([*spell("ab"), 24281], stop_ids=[24281], max_tokens=3)[:2] == (b"ab", FinishReason.STOP)


def _held(text: bytes, stops: set[bytes]) -> int:
    """Reference: the longest suffix of the text that is a prefix of a stop."""
    return max((n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)), default=0)


@pytest.mark.parametrize("seed", rest_slow(range(20 if IS_LONG else 8), 4))
def test_the_automaton_against_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice(["a", "ab", "abc\n"])
    stops = {
        "".join(rng.choice(letters) for _ in range(rng.randint(1, rng.choice([3, 8, 30])))).encode()
        for _ in range(rng.randint(1, 64))
    }
    automaton = StopAutomaton(stops)
    for _ in range(40):
        node, text = automaton.root, b""
        while len(text) < 60:
            piece = "".join(rng.choice(letters + "x") for _ in range(rng.randint(1, 5))).encode()
            node, found = automaton.advance(node, piece)
            before, text = len(text), text + piece
            ends = ((i, stop) for stop in stops for i in range(len(text)) if text.startswith(stop, i))
            begins = [at for at, stop in ends if at + len(stop) > before]
            assert (None if found is None else before + found) == min(begins, default=None)
            assert node.depth == _held(text, stops)


def test_the_cost_of_a_byte_does_not_grow_with_the_number_of_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts transitions: at most two per byte over a whole text, with any stops."""
    rng = random.Random(3)
    text = bytes(rng.choice(b"ab") for _ in range(5000))
    moves = 0

    class Children(dict[int, object]):
        def __contains__(self, byte: object) -> bool:
            nonlocal moves
            moves += 1
            return super().__contains__(byte)

    stops = {bytes(rng.choice(b"ab") for _ in range(200)) + b"x" for _ in range(64)}
    stops |= {b"a" * n + b"y" for n in range(64)}
    automaton, node_of = StopAutomaton(stops), StopAutomaton._node

    def counted(self: StopAutomaton, depth: int, inside: range) -> object:
        node = node_of(self, depth, inside)
        node.children = Children(node.children)  # type: ignore[assignment]
        return node

    monkeypatch.setattr(StopAutomaton, "_node", counted)
    for _ in range(2):  # the first pass creates the nodes
        moves, node = 0, automaton.root
        for start in range(0, len(text), 5):
            node, found = automaton.advance(node, text[start : start + 5])
            assert found is None
    assert 0 < moves <= 2 * len(text)


def test_rows_with_the_same_stops_share_one_automaton() -> None:
    cache = StopRulesCache(TABLE)
    asked = request(stop_strings=[b"STOP", b"END"], stop_ids=[261])
    first = cache.build(asked)
    assert cache.build(request(stop_strings=[b"END", b"STOP"], stop_ids=[261], max_tokens=3)) is first
    assert cache.build(request(stop_strings=[b"END"], stop_ids=[261])) is not first
    del first
    assert not cache._rules, "the cache keeps it only while rows use it"


@pytest.mark.parametrize("chunk_size", [0, 1, 2])
@pytest.mark.parametrize(
    ("pieces", "received"),
    [
        (["a", "b", "c", "d"], [b"a", b"b"]),
        (["a", " the", " cd"], [b"a", b" the", b" "]),
        (["a", " abc", "d"], [b"a", b" ab"]),
        (["a", " abc", "e", "cd"], [b"a", b" abc", b"e"]),
        ([" abc"], [b" abc"]),
    ],
)
def test_log_probabilities_are_of_shown_text(pieces: list[str], received: list[bytes], chunk_size: int) -> None:
    """Each delta's tokens joined are its text. A stop cuts the last token."""
    tokens = [next(token for token, text in enumerate(TABLE) if text == piece.encode()) for piece in pieces]
    asked = request(stop_strings=[b"cd"], chunk_size=chunk_size, max_tokens=len(tokens))
    output = RowOutput(0, asked, StopRules(asked, TABLE), TABLE)
    entries: list[bytes] = []
    for token in tokens:
        reason = output.append_token(token, TokenLogprob(TABLE[token], -1.0, []))
        if delta := output.pop_delta(DONE if reason else None):
            new = [entry.token for entry in delta.logprobs or ()]
            assert b"".join(new) == delta.text
            entries += new
    assert entries == received
