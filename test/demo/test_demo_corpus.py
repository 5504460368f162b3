"""The training text: the same by seed, in the right forms, wide enough, and never on the held-out side."""

from __future__ import annotations

import re
from random import Random

import pytest

from demo.corpus import arithmetic, chat, infill, lexicon, mixture, sentences, translation
from demo.corpus.document import text_of
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
