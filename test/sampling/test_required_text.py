"""Markers and words in generated text: a random model under the masks never loses one."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from functools import cache

import msgspec
import numpy as np
import pytest
import torch

from rwkv_batch.tokenizer import VOCAB_SIZE
from rwkv_batch.translation.markers import Format, MarkerOptions, Segment
from rwkv_batch.translation.segments import Split, split_text
from sampling.grammar import masks
from sampling.grammar.constraint import EARLY_ENDS, NoTokenLeftError, RequiredText
from sampling.grammar.required_text import MarkerAutomaton, RequiredTextMatcher, RequiredTexts, State
from test.conftest import rest_slow
from test.harness import TOKENIZER

PLAIN = ["the cat", "sees", "two dogs", "and", "5 apples", "，", "a_b", "it's > 3", "猫"]
MARKERS = [
    "%s", "%d", "%1$s", "%2$d", "%(name)s", "%@", "{name}", "{}", "{{x}}", "{{ user.name }}", "${x}", "{names}",
    "<br/>", "https://example.org/a?b=1", "https://example.org", "me@example.org", "`ls -l`", "{n, date}", "<3/>",
]  # fmt: skip


@cache
def texts() -> RequiredTexts:
    return RequiredTexts(TOKENIZER, VOCAB_SIZE)


def some_text(dice: random.Random, depth: int = 0) -> str:
    """Return text with markers and nested tags.

    Like `the cat <a href="%s">sees {name}</a>`.
    """
    parts = []
    for _ in range(dice.randint(1, 4)):
        kind = dice.random()
        if kind < 0.2 and depth < 3:
            tag = dice.choice(["a", "b", "g1", "0"])
            parts.append(f'<{tag} x="1">{some_text(dice, depth + 1)}</{tag}>')
        else:
            parts.append(dice.choice(MARKERS if kind < 0.7 else PLAIN))
    return dice.choice(["", " "]).join(parts)


def segment(text: str, **options: object) -> Segment | None:
    found = [one for one in split_text(text, MarkerOptions(**options), Split.NONE, "en") if isinstance(one, Segment)]  # type: ignore[arg-type]
    return found[0] if found else None


def generate(matcher: RequiredTextMatcher, dice: random.Random, eagerness: float) -> tuple[str, bool]:
    """Return a random model's text under masks, and whether it ended.

    eagerness: chance that it prefers a token with a character of markers
    """
    table, out, twin = (
        TOKENIZER.byte_table,
        b"",
        copy.deepcopy(matcher, {id(one): one for one in (texts(), matcher._automaton)}),
    )
    lead_ids = _lead_ids()
    while True:
        mask = matcher.mask()

        def is_allowed(token: int, mask: np.ndarray = mask) -> bool:
            return bool(mask[token >> 5] >> (token & 31) & 1)

        ids = lead_ids if dice.random() < eagerness else range(VOCAB_SIZE)
        tries = (dice.choice(ids) for _ in range(30))
        token = next((one for one in tries if is_allowed(one)), -1)
        if token < 0:
            word = dice.choice(np.flatnonzero(mask).tolist())
            token = 32 * word + dice.choice([bit for bit in range(32) if mask[word] >> bit & 1])
        sampled, token = token, matcher.resolve(token)
        assert token == sampled or sampled in EARLY_ENDS
        out += table[token]
        is_text = twin.add_text(sampled)  # as the product does, before it resolves the token
        assert not is_text or sampled == token
        assert is_text or twin.resolve(sampled) == token
        has_ended = matcher.advance(token)
        assert (not is_text or not has_ended) and (is_text or twin.advance(token) == has_ended)
        assert has_ended or ((matcher.mask() == twin.mask()).all() and matcher.replacement == twin.replacement)
        if has_ended:
            return out.decode(errors="replace"), True
        if matcher._tokens_left == 0:
            return out.decode(errors="replace"), False


@cache
def _lead_ids() -> list[int]:
    return [*EARLY_ENDS * 20, *(i for i, token in enumerate(TOKENIZER.byte_table) if set(b"<>{}%$\n") & set(token))]


def assert_complete(required: RequiredText, answer: str) -> None:
    """Check with plain regular expressions that markers are complete and nest."""
    names = required.markers
    known = "|".join(map(re.escape, sorted({*names}, key=len, reverse=True)))
    found = re.findall(known, answer) if names else []
    assert Counter(found) == Counter(names), (required, answer)
    unnumbered = [names[i] for i in required.ordered]
    assert [one for one in found if one in unnumbered] == unnumbered
    left = "".join(one for one in found if re.fullmatch(r"</?\d+>", one))
    while left:
        left, before = re.sub(r"<(\d+)></\1>", "", left), left
        assert left != before, (required, answer)


@pytest.mark.slow
def test_a_random_model_gives_each_marker_once_and_tags_nest() -> None:
    check_random_texts(0, 500)


def check_random_texts(seed: int, count: int) -> None:
    """Check that random texts have each marker once, nested well."""
    dice = random.Random(seed)
    checked = 0
    while checked < count:
        one = segment(some_text(dice), keep=("cat",) if dice.random() < 0.1 else ())
        required = one.required() if one else None
        if one is None or required is None:
            continue
        ends = dice.choice([("\n",), ("\n\n", "\nEnglish:")])
        required = msgspec.structs.replace(required, ends=ends)
        max_tokens = 12 * len(one.markers) + dice.randint(10, 30)
        matcher = RequiredTextMatcher(texts(), required, max_tokens)
        answer, _ = generate(matcher, dice, dice.choice([0.0, 0.3, 0.9]))
        assert_complete(required, answer)
        assert answer.casefold().count("cat") >= sum(count for _, count in required.words)
        if not set("`@$%:\ufffc") & set(answer) and set("<{") <= set(required.leads):
            assert one.restore(answer.partition("\n\n")[0]) is not None, (one, answer)
        checked += 1


def automaton(*names: str, leads: str = "<{%", ends: tuple[str, ...] = ("\n",)) -> MarkerAutomaton:
    pairs = {"<0>": "</0>", "</0>": "<0>"}
    partners = [names.index(pairs[name]) if name in pairs else -1 for name in names]
    required = RequiredText(markers=names, partners=tuple(partners), leads=leads, ends=ends)
    return texts().automaton(required)


STATES = [
    State(), State(prefix=b"<"), State(prefix=b"{a"), State(given=1, opened=(0,)), State(given=0b11111),
    State(given=7), State(tail=b"\n"), State(given=0b11111, tail=b"\n"),
]  # fmt: skip


@pytest.mark.parametrize("state", rest_slow(STATES, 2))
@pytest.mark.parametrize("has_words", [True, False])
def test_a_mask_allows_what_the_text_may_continue_with(state: State, has_words: bool) -> None:
    one = automaton("<0>", "</0>", "{a}", "{ab}", "%s", ends=("\n\n", "\nGerman:"))
    bits = np.unpackbits(one.mask(state, has_words).view(np.uint8), bitorder="little").astype(bool)
    allowed = {i for i in np.flatnonzero(bits).tolist() if i not in EARLY_ENDS}
    expected = {
        i for i, token in enumerate(texts().index.table)
        if token and i not in EARLY_ENDS and one.walk(state, token, has_words) is not None
    }  # fmt: skip
    strict = {i for i in expected - allowed if b"\n" not in texts().index.table[i]}
    assert not allowed - expected and not strict, "only tokens with line breaks may be left out"
    for byte in b"\n" if not state.prefix and not state.tail else b"":
        assert texts().index.id_of[bytes((byte,))] in allowed


def required(text: str, **options: object) -> RequiredText:
    one = segment(text, **options)
    assert one is not None
    found = one.required()
    assert found is not None
    return found


def written(required: RequiredText, *pieces: str, max_tokens: int = 1000) -> RequiredTextMatcher:
    """Return a matcher after some tokens, each of which the mask allows. "": an end."""
    matcher = RequiredTextMatcher(texts(), required, max_tokens)
    for piece in pieces:
        for token in TOKENIZER.encode_bytes(piece.encode()) if piece else [0]:
            assert matcher.mask()[token >> 5] >> (token & 31) & 1, piece
            if matcher.advance(matcher.resolve(token)):
                break
    return matcher


def test_a_marker_that_was_given_is_not_given_again_and_order_stays() -> None:
    one = required("%s is {name} and %d")
    for pieces in (["%d"], ["%s", "%s"], ["{name}", "{name}"], ["{other}"], ["{name", "s}"], ["<b>"], ["\n"]):
        with pytest.raises((NoTokenLeftError, AssertionError)):
            written(msgspec.structs.replace(one, ends=("\n",)), *pieces)
    assert not written(one, "{name}", "%s", "%d", "").was_completed
    assert not written(required("%1$s is %2$s"), "%2$s", "%1$s", "").was_completed


def test_an_early_end_is_replaced_by_a_marker() -> None:
    matcher = written(required("See <b>it</b> at {place}."), "Da", "")
    assert matcher.was_completed and matcher.jump_forward_tokens() == TOKENIZER.encode_bytes(b"0>")
    matcher = written(required("See <b>it</b>."), "Da <0>es", "")
    assert not matcher.was_completed, "closing a tag is no guess"


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 40])
def test_at_max_tokens_the_rest_is_closed_as_far_as_it_fits(max_tokens: int) -> None:
    one = required("Go to <b>{city}</b> with %s or <i>me</i> now.")
    answer, has_ended = generate(RequiredTextMatcher(texts(), one, max_tokens), random.Random(1), 0.0)
    assert has_ended == (max_tokens == 40)
    if has_ended:
        assert_complete(one, answer)


def word(*forms: str, count: int = 1) -> RequiredText:
    return RequiredText(words=((forms, count),), ends=("\n",))


@pytest.mark.parametrize(
    ("forms", "text", "has_all"),
    [
        (["Katze"], "Die Katze", True), (["Katze"], "Die Katzen", False), (["Katze", "Katzen"], "die katzen.", True),
        (["Katze"], "Wildkatze", False), (["状态池"], "这个状态池很大", True), (["状态"], "这个状态池", True),
        (["GPU"], "用GPU跑", True), (["GPU"], "GPUs", False), (["кот"], "который", False), (["кот"], "Кот!", True),
    ],
)  # fmt: skip
def test_words_are_whole_and_ignore_case(forms: list[str], text: str, has_all: bool) -> None:
    matcher = RequiredTextMatcher(texts(), word(*forms), 1000)
    for byte in text.encode():
        matcher.advance(texts().index.id_of[bytes((byte,))])
    assert matcher._has_words == has_all


def test_a_contained_word_is_needed_for_itself() -> None:
    both = RequiredText(words=((("状态",), 1), (("状态池",), 1)))
    assert written(both, "状态池很大", "").was_completed
    assert not written(both, "状态池的状态", "").was_completed


def test_a_rejected_word_hides_no_later_one() -> None:
    both = RequiredText(words=((("IT部门",), 1), (("部门经理",), 1)), ends=("\n",))
    matcher = RequiredTextMatcher(texts(), both, 1000)
    for byte in "BIT部门经理今天没有来，请稍后再打。".encode():
        matcher.advance(texts().index.id_of[bytes((byte,))])
    assert matcher._words is not None and matcher._words.missing == [1, 0]


def test_hostile_markers_take_bounded_time_and_memory() -> None:
    many = [f"{{{'x' * 30}{number}}}" for number in range(64)]
    one = required(" ".join(["word", *many]))
    matcher = RequiredTextMatcher(texts(), one, 2000)
    answer, has_ended = generate(matcher, random.Random(2), 0.5)
    assert has_ended and Counter(re.findall(r"\{x+\d+\}", answer)) == Counter(many)
    for number in range(600):
        texts().automaton(RequiredText(markers=(f"{{{number}}}",), partners=(-1,), leads="{"))
    caches = (texts()._automaton, texts().mask, texts().index.with_any)
    assert [cache.cache_info().maxsize for cache in caches] == [256, 4096, 64]  # type: ignore[attr-defined]


def test_markup_keeps_entities_in_terms() -> None:
    one = segment("Use AT&amp;T <b>now</b>.", format=Format.HTML, keep=("AT&amp;T",))
    assert one is not None and one.shown() == "Use AT&T <1>now</1>."
    assert one.restore("AT&T nutzen, AT&T <1>jetzt</1> & hier") == "AT&amp;T nutzen, AT&amp;T <b>jetzt</b> &amp; hier"
    assert one.restore("nutzen <1>jetzt</1>") is None


def test_masks_of_equal_states_have_one_row_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table overflows often, and nothing else keeps its masks, whose addresses Python then uses again."""
    monkeypatch.setattr(masks, "TABLE_ROWS", 4)
    kept, dice = masks.Masks(64, torch.device("cpu"), 1), random.Random(5)
    last = np.zeros(2, np.int32)
    for _ in range(200):
        new = [np.array([dice.randrange(1 << 30), 0], np.int32) for _ in range(dice.randint(0, 2))]
        wanted = dice.choices([last, *new], k=4)
        rows = kept._table_rows_of(wanted)
        assert (kept._table[rows].numpy() == np.stack(wanted)).all()
        assert len(set(rows)) == len({id(one) for one in wanted}) and kept._table_rows_of(wanted) == rows
        last = wanted[0]
    assert len(kept._table) == 4


@pytest.mark.parametrize("end", EARLY_ENDS)
def test_an_early_end_is_no_text(end: int) -> None:
    matcher = written(required("x {a}"))
    assert not matcher.add_text(end) and matcher.resolve(end) == texts().encode(b"{a}")[0]
    assert matcher.jump_forward_tokens() == texts().encode(b"{a}")
