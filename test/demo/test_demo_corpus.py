"""The training text: the same by seed, in the right forms, wide enough, and never on the held-out side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

import pytest

from demo.corpus import (
    arithmetic,
    chat,
    infill,
    lexicon,
    manners,
    mixture,
    sentences,
    structured,
    tools,
    translation,
)
from demo.corpus.document import Document, text_of
from demo.corpus.split import held_out
from demo.evaluate import held_pairs

WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def test_the_same_seed_gives_the_same_text() -> None:
    one, other = Random(3), Random(3)
    assert [mixture.document(one) for _ in range(200)] == [mixture.document(other) for _ in range(200)]


def test_the_english_side_knows_four_thousand_words() -> None:
    words = set()
    for name in ("nouns", "people"):
        for group in lexicon.nouns(name).values():
            for noun in group:
                words.update(WORD.findall(f"{noun.en} {noun.plural}".lower()))
    for group in lexicon.verbs().values():
        for verb in group:
            words.update(WORD.findall(f"{verb.base} {verb.third} {verb.past} {verb.participle} {verb.gerund}"))
    for name in ("mass", "people", "places", "ui", "adverbs"):
        for terms in lexicon.terms(name).values():
            for term in terms:
                words.update(
                    WORD.findall(f"{term.en} {term.extra[0] if name == 'places' and term.extra else ''}".lower())
                )
    for adjectives in lexicon.adjectives().values():
        for adjective in adjectives:
            words.update(WORD.findall(f"{adjective.en} {adjective.comparative}"))
    for english, _, _ in lexicon.phrases():
        words.update(WORD.findall(english.lower()))
    assert len(words) >= 4000


def test_training_never_emits_what_the_evaluation_asks() -> None:
    held = held_pairs(300, seed=1)
    english, chinese = {en for en, _ in held}, {zh for _, zh in held}
    rng = Random(5)
    for _ in range(20_000):
        pair = translation.fresh_pair(rng)
        assert pair.en not in english and pair.zh not in chinese
        assert not any(held_out(meaning) for meaning in pair.meanings)


def test_variants_of_a_sentence_are_on_its_side_of_the_split() -> None:
    assert held_out("She bought two books.") == held_out("she bought two books") == held_out("SHE BOUGHT TWO BOOKS!")


def test_training_sessions_are_never_held_out_ones() -> None:
    rng = Random(1)
    for _ in range(500):
        facts = [turn.recall for turn in chat.session(rng, held=True) if turn.recall]
        assert facts


def test_a_meaning_has_one_translation_each_way() -> None:
    rng, to_chinese, to_english, clashes = Random(7), {}, {}, 0
    for _ in range(40_000):
        pair = sentences.sentence(rng)
        clashes += to_chinese.setdefault(pair.en, pair.zh) != pair.zh
        clashes += to_english.setdefault(pair.zh, pair.en) != pair.en
    assert clashes <= 4


def test_translation_documents_have_the_public_form() -> None:
    rng = Random(2)
    for _ in range(300):
        text = text_of(translation.document(rng))
        assert re.match(
            r"English: .+\n\n(Chinese|German|Japanese): .+\n\n|(Chinese|German|Japanese): .+\n\nEnglish: .+\n\n", text
        )
        assert text.endswith("\n\n") and "\n\n\n" not in text


def test_chats_are_rounds_of_user_and_assistant() -> None:
    rng = Random(2)
    for _ in range(200):
        text = text_of(chat.document(rng))
        labels = [part.partition(":")[0] for part in text.rstrip("\n").split("\n\n")]
        if labels[0] == "System":
            labels = labels[1:]
        assert labels == ["User", "Assistant"] * (len(labels) // 2)


def test_infill_has_its_flowers() -> None:
    text = text_of(infill.document(Random(4)))
    assert text.startswith("✿prefix✿✿suffix✿") and text.endswith("✿") and text.count("✿") == 7


def test_sums_are_right() -> None:
    rng = Random(4)
    for _ in range(500):
        one, other, sign, result = arithmetic.sum_(rng)
        assert result == (one + other, one - other, one * other, one // max(other, 1))[sign]


@pytest.mark.parametrize("wanted", ["一杯", "两本", "三点半", "下周一", "如果", "因为", "所以", "就"])
def test_the_chinese_uses_what_it_should(wanted: str) -> None:
    rng = Random(11)
    assert any(wanted in sentences.sentence(rng).zh for _ in range(30_000))


def test_calls_are_listed_functions_with_listed_parameters() -> None:
    rng = Random(3)
    for _ in range(300):
        listing = tools.listing(rng, rng.randint(1, 5))
        wish = tools.wish(rng, listing)
        call = json.loads(wish.call)
        (chosen,) = [tool for tool in listing if tool.name == call["name"]]
        assert tuple(call["arguments"]) == chosen.parameters
        assert all(str(value) in wish.asked for value in call["arguments"].values())
        assert isinstance(json.loads(wish.result), dict) and "{" not in wish.told


def test_talks_with_tools_are_rounds_after_a_listing() -> None:
    rng = Random(4)
    for _ in range(200):
        text = text_of(tools.document(rng))
        first, *others = text.rstrip("\n").split("\n\n")
        assert first.startswith("System: ") and "Tools:\n- " in first and first.endswith(tools.ONLY_CALLS)
        assert [part.partition(":")[0] for part in others] == ["User", "Assistant"] * (len(others) // 2)


def test_calls_of_the_evaluation_are_not_trained_on() -> None:
    rng = Random(6)
    held = {tools.held_wish(rng)[1].asked for _ in range(100)}
    trained = {tools.wish(rng, tools.listing(rng, 5)).asked for _ in range(5000)}
    assert not held & trained


def test_answers_as_json_are_objects_of_what_was_said() -> None:
    rng = Random(8)
    for held in (False, True):
        for _ in range(200):
            asked, answer = structured.extraction(rng, held=held)
            assert all(str(value) in asked for value in json.loads(answer).values())
    for _ in range(200):
        *_, last, _ = (segment.text for segment in structured.document(rng))
        assert isinstance(json.loads(last.lstrip(">")), dict)


def test_phrases_of_adapters_are_no_translations_of_the_base() -> None:
    rng = Random(9)
    texts = [text_of(mixture.document(rng)) for _ in range(3000)]
    assert not [text for text in texts if re.search(r"^(French|Spanish):|\n\n(French|Spanish):", text)]
    assert any("French" in text_of(manners.french(rng)) for _ in range(20))


@pytest.mark.parametrize("source", [manners.in_chinese, manners.in_json])
def test_a_state_is_trained_on_rounds_in_its_manner(source: Callable[[Random], Document]) -> None:
    rng = Random(1)
    for _ in range(100):
        answers = [segment.text for segment in source(rng)][1::3]
        if source is manners.in_json:
            assert all(isinstance(json.loads(answer.lstrip(">")), dict) for answer in answers)
        else:
            assert all(any(ord(sign) > 0x2000 for sign in answer) for answer in answers)
