"""The training text: deterministic by seed, well-formed, varied, and without held-out sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

import pytest

from demo.corpus import chat, grammar, mixture, pages, structured, tools, translation, tuning, words
from demo.corpus.documents import Document, held_out, text_of
from demo.evaluate import held_pairs
from rwkv_batch.translation.markers import MarkerOptions, Segment
from rwkv_batch.translation.prompts import shared_prompt
from rwkv_batch.translation.segments import Split, split_text
from test.conftest import IS_LONG

WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def test_the_same_seed_gives_the_same_text() -> None:
    one, other = Random(3), Random(3)
    assert [mixture.document(one) for _ in range(200)] == [mixture.document(other) for _ in range(200)]


def test_the_english_side_knows_four_thousand_words() -> None:
    known: set[str] = set()
    for name, table in words.tables().items():
        fields = (
            "en",
            "plural",
            "third",
            "past",
            "participle",
            "gerund",
            "more",
            *(("x",) if name == "country" else ()),
        )
        for word in table:
            known.update(WORD.findall(" ".join(str(word.get(field, "")) for field in fields).lower()))
    for (line,) in words.phrase_table("chinese"):
        known.update(WORD.findall(line.lower()))
    assert len(known) >= 4000


def test_training_never_contains_evaluation_prompts() -> None:
    held = held_pairs(300 if IS_LONG else 50, seed=1)
    english, chinese = {en for en, _ in held}, {zh for _, zh in held}
    rng = Random(5)
    for _ in range(20_000 if IS_LONG else 1_500):
        pair = translation.fresh_pair(rng)
        assert pair.en not in english and pair.zh not in chinese
        assert not any(held_out(meaning) for meaning in pair.meanings)


def test_variants_of_a_sentence_are_on_its_side_of_the_split() -> None:
    assert held_out("She bought two books.") == held_out("she bought two books") == held_out("SHE BOUGHT TWO BOOKS!")


def test_training_sessions_are_never_held_out_ones() -> None:
    rng = Random(1)
    for _ in range(500 if IS_LONG else 100):
        facts = [turn.recall for turn in chat.session(rng, held=True) if turn.recall]
        assert facts


def test_a_meaning_has_one_translation_each_way() -> None:
    rng, to_chinese, to_english, clashes = Random(7), {}, {}, 0
    for _ in range(40_000 if IS_LONG else 5_000):
        pair = translation.sentence(rng)
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


@pytest.mark.parametrize("skill", pages.SKILLS)
def test_pages_decide_the_translation(skill: Callable[..., pages.Case]) -> None:
    rng = Random(4)
    for held in (False, True):
        for case in (skill(rng, held=held) for _ in range(20 if IS_LONG else 8)):
            assert case.expected and all(part in case.target for part in case.expected)
            asked = pages.query(rng, case)
            prompt = shared_prompt(asked) + pages.prompt_of(asked)
            if case.skill == "markers":
                assert all(part in case.source for part in case.expected)
            elif case.skill == "address":
                assert (pages.POLITE if case.expected == ("您",) else pages.PLAIN) in prompt
            else:
                assert prompt.startswith(("English: ", "Terms: ")) or asked.context
            assert case.target not in prompt
            for word, term in case.terms:
                before = prompt.rpartition("English: ")[0]
                assert word in before and term in before


def test_the_model_reads_markers_as_the_service_shows_them() -> None:
    rng = Random(8)
    for case in (pages.markers(rng) for _ in range(200)):
        (segment,) = split_text(case.source, MarkerOptions(), Split.NONE, "en" if case.english else "zh")
        assert isinstance(segment, Segment) and segment.shown() == case.source
        assert segment.restore(case.target) == case.target, case
        required = segment.required()
        assert required is not None and set(required.markers) == set(case.expected)


def test_pages_of_the_evaluation_are_not_trained_on() -> None:
    rng = Random(6)
    held = {
        skill(rng, held=True).source for skill in (pages.address, pages.pronouns) for _ in range(20 if IS_LONG else 5)
    }
    assert not held & {pages.address(rng).source for _ in range(100)} and all(map(held_out, held))
    text = text_of(pages.document(rng))
    assert "English: " in text and "Chinese: " in text and text.endswith("\n\n")


def test_chats_are_rounds_of_user_and_assistant() -> None:
    rng = Random(2)
    for _ in range(200):
        text = text_of(chat.document(rng))
        labels = [part.partition(":")[0] for part in text.rstrip("\n").split("\n\n")]
        if labels[0] == "System":
            labels = labels[1:]
        assert labels == ["User", "Assistant"] * (len(labels) // 2)


def test_infill_has_its_flowers() -> None:
    text = text_of(mixture.infill(Random(4)))
    assert text.startswith("✿prefix✿✿suffix✿") and text.endswith("✿") and text.count("✿") == 7


def test_sums_are_right() -> None:
    rng = Random(4)
    for _ in range(500):
        one = chat.arithmetic(rng)
        a, b = one["a"], one["b"]
        expected = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}
        assert one["result"] == expected[one["sign"]] >= 0 and (one["sign"] != "/" or a % b == 0)


@pytest.mark.parametrize("expected", ["一杯", "两本", "三点半", "下周一", "如果", "因为", "所以", "就"])
def test_the_chinese_has_required_words(expected: str) -> None:
    rng = Random(11)
    assert any(expected in translation.sentence(rng).zh for _ in range(30_000))


def test_calls_are_listed_functions_with_listed_parameters() -> None:
    rng = Random(3)
    for _ in range(300):
        listing = tools.listing(rng, rng.randint(1, 5))
        request = tools.request(rng, listing)[1]
        call = json.loads(request.call)
        (chosen,) = [tool for tool in listing if tool.name == call["name"]]
        assert tuple(call["arguments"]) == chosen.parameters
        assert all(str(value) in request.asked for value in call["arguments"].values())
        assert isinstance(json.loads(request.result), dict) and "{" not in request.told


def test_tool_conversations_are_rounds_after_a_listing() -> None:
    rng = Random(4)
    for _ in range(200):
        text = text_of(tools.document(rng))
        first, *others = text.rstrip("\n").split("\n\n")
        assert first.startswith("System: ") and "Tools:\n- " in first and first.endswith(tools.ONLY_CALLS)
        assert [part.partition(":")[0] for part in others] == ["User", "Assistant"] * (len(others) // 2)


def test_calls_of_the_evaluation_are_not_trained_on() -> None:
    rng = Random(6)
    held = {tools.request(rng, held=True)[1].asked for _ in range(100)}
    trained = {tools.request(rng, tools.listing(rng, 5))[1].asked for _ in range(5000 if IS_LONG else 2000)}
    assert not held & trained


def test_json_answers_are_objects_of_the_given_facts() -> None:
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
    texts = [text_of(mixture.document(rng)) for _ in range(3000 if IS_LONG else 600)]
    assert not [text for text in texts if re.search(r"^(French|Spanish):|\n\n(French|Spanish):", text)]
    assert any("French" in text_of(tuning.french(rng)) for _ in range(20))


@pytest.mark.parametrize("source", [tuning.in_chinese, tuning.in_json])
def test_a_state_is_trained_on_rounds_in_its_manner(source: Callable[[Random], Document]) -> None:
    rng = Random(1)
    for _ in range(100):
        answers = [segment.text for segment in source(rng)][1::3]
        if source is tuning.in_json:
            assert all(isinstance(json.loads(answer.lstrip(">")), dict) for answer in answers)
        else:
            assert all(any(ord(sign) > 0x2000 for sign in answer) for answer in answers)


def test_a_template_agrees_with_its_subject() -> None:
    subjects = (
        {"en": "I", "zh": "我", "person": "1"},
        {"en": "he", "zh": "他"},
        {"en": "they", "zh": "他们", "many": True},
    )
    said = [grammar.render(Random(1), "{who} {who:is/are/am} a(n) actor. | {who}是演员。", who=who) for who in subjects]
    assert [one["en"] for one in said] == ["I am an actor.", "he is an actor.", "they are an actor."]
    assert [one["zh"] for one in said] == ["我是演员。", "他是演员。", "他们是演员。"]


def test_a_wrong_template_is_rejected() -> None:
    with pytest.raises(KeyError, match="unknown symbol nobody"):
        grammar.render(Random(1), "{nobody}.")
    with pytest.raises(ValueError, match="not a reference"):
        grammar.render(Random(1), "{who is}.")


def test_every_family_of_sentences_can_be_sampled() -> None:
    rng = Random(2)
    for alternative in grammar.sections()["sentence"].alternatives:
        ((reference,),) = alternative.columns
        assert isinstance(reference, grammar.Reference)
        for _ in range(200 if IS_LONG else 50):
            phrase = grammar.expand(rng, reference.symbol)
            assert phrase["en"] and phrase["zh"] and not re.search(r"[{}@|]|  ", phrase["en"] + phrase["zh"])
