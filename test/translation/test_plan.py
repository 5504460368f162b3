"""A translation request: rounds of texts for the model, and what comes of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rwkv_batch.translation.checks import problem
from rwkv_batch.translation.context import ContextMode
from rwkv_batch.translation.glossary import Glossary, GlossaryMode
from rwkv_batch.translation.languages import join_sentences
from rwkv_batch.translation.markers import Format, MarkerOptions
from rwkv_batch.translation.plan import (
    Query,
    TooManySegmentsError,
    Translation,
    TranslationCache,
    TranslationPlan,
    TranslationRequest,
)
from rwkv_batch.translation.segments import Split

Model = Callable[[Query], str]


def translated(
    model: Model, *texts: str, cache: TranslationCache | None = None, **options: Any
) -> tuple[list[Translation], list[Query]]:
    """Return the translations of a model, and what it was asked."""
    request = TranslationRequest(texts=texts, **{"source": "en", "target": "de", **options})
    plan = TranslationPlan(request, 5000, cache or TranslationCache(0))
    asked: list[Query] = []
    while queries := plan.missing():
        asked += queries
        plan.add_answers({query: model(query) for query in queries})
    return plan.results(), asked


def loud(text: str) -> str:
    """Another language: capital letters with dots."""
    return text.upper().translate({ord("E"): "Ë", ord("O"): "Ö"})


def upper(query: Query) -> str:
    return loud(query.text)


def without_markers(query: Query) -> str:
    """A model that loses every marker."""
    return loud(query.text) if not set("{}<>%") & set(query.text) else "VERLOREN"


def test_lines_and_white_space_stay() -> None:
    text = "".join(f"  line {index % 40} is here \t\r\n\n" for index in range(3000))
    (result,), asked = translated(upper, text)
    assert result.text == loud(text) and len(asked) == 40 and not result.problems


def test_sentences_of_scripts_without_spaces_get_them() -> None:
    """A Chinese book was one word in English: "Hello.Goodbye."."""
    text = "早上好。再见！\n好。 是。"
    options = {"source": "zh", "split": Split.SENTENCES}
    (one,), _ = translated(lambda query: "Yes.", text, target="en", **options)
    assert one.text == "Yes. Yes.\nYes. Yes."
    (same,), _ = translated(lambda query: "はい。", text, target="ja", **options)
    assert same.text == "はい。はい。\nはい。はい。"


def test_no_space_follows_a_chinese_full_stop() -> None:
    text, options = "One is. Two are?  Three.\n Four <b>is.</b> Five", {"split": Split.SENTENCES, "target": "zh"}
    answers = iter(["一。", "二？", "三", "四<0>。</0>", "五"])
    (one,), _ = translated(lambda query: next(answers), text, source="en", **options)
    assert one.text == "一。二？三\n 四<b>。</b> 五"
    assert join_sentences([("x）", True), (" ", False), ("y", True)], "th") == "x） y", (
        "a space separates Thai sentences"
    )


def test_a_text_is_complete_before_the_others() -> None:
    request = TranslationRequest(texts=["One row.\nTwo rows.", "Three rows.", "4"], source="en", target="de")
    plan = TranslationPlan(request, 10, TranslationCache(0))
    first, second, third = plan.missing()
    assert plan.result(2) is not None and plan.result(0) is None
    plan.add_answers({third: upper(third), first: upper(first)})
    assert plan.result(0) is None and (found := plan.result(1)) is not None and found.text == loud("Three rows.")
    plan.add_answers({second: upper(second)})
    assert (found := plan.result(0)) is not None and found.text == loud("One row.\nTwo rows.") and not plan.missing()
    rolling = replace(request, mode=ContextMode.ROLLING)
    plan = TranslationPlan(rolling, 10, TranslationCache(0))
    (only,) = plan.missing()
    plan.add_answers({only: upper(only), replace(third): upper(third)})
    assert plan.result(1) is None, "a later chunk has another history"


def test_lost_markers_are_split_around() -> None:
    texts = ("Hello {name}, you have <b>two</b> mails.", "{a} {b}", "Plain text stays whole.")
    found, asked = translated(without_markers, *texts)
    assert [one.text for one in found] == ["HËLLÖ {name}, YÖU HAVË <b>TWÖ</b> MAILS.", "{a} {b}", loud(texts[2])]
    assert found[0].problems == ["was split around 3 markers that the model did not keep"] and not found[1].problems
    assert [query.text for query in asked] == [
        "Hello {name}, you have <1>two</1> mails.", texts[2], "Hello", ", you have", "two", "mails."
    ]  # fmt: skip
    barred = [query.required.leads for query in asked if query.required is not None and not query.required.markers]
    assert barred == ["<{$%"] * 4, "the parts could have new markers"


def test_problems_of_parts_are_reported() -> None:
    (one,), _ = translated(lambda query: "" if "now" in query.text else "Hallo", "Hello {name}, go there now")
    assert one.problems == ["was split around 1 marker that the model did not keep", "is empty"]


def test_a_text_without_markers_gets_none() -> None:
    answers = iter(["Ich sehe <0>die Katze</0>.", "Ich sehe die Katze."])
    (one,), asked = translated(lambda query: next(answers), "I see the black cat.")
    assert one.text == "Ich sehe die Katze." and not one.problems
    assert [query.required and query.required.leads for query in asked] == [None, "<{$%"]


def test_markup_is_decoded_and_encoded() -> None:
    html = MarkerOptions(Format.HTML)
    (result,), asked = translated(
        upper, "<p>Tom &amp; Jane\n  <b>a &lt; b</b> x.</p>", markers=html, split=Split.SENTENCES
    )
    assert [query.text for query in asked] == ["Tom & Jane <0>a < b</0> x."]
    assert result.text == "<p>TÖM &amp; JANË <b>A &lt; B</b> X.</p>"


def test_a_wrong_answer_is_sampled_once_more() -> None:
    def model(query: Query) -> str:
        return "Ich sehe die Katze." if query.attempt and "cat" in query.text else query.text

    found, asked = translated(model, "I see the black cat.", "I see the white dog.")
    assert [one.text for one in found] == ["Ich sehe die Katze.", "I see the white dog."]
    assert [one.problems for one in found] == [[], ["is a copy of the text"]]
    assert [query.attempt for query in asked] == [0, 0, 1, 1]


def test_terms_are_inserted_and_missing_ones_reported() -> None:
    glossary = Glossary({"state pool": "Zustandsspeicher", "row": "Zeile"})

    def model(query: Query) -> str:
        return query.text_with_terms if "Pool" in query.text else "ETWAS"

    found, asked = translated(model, "The State Pool holds it.", "It is a row.", "A state pool row.", glossary=glossary)
    assert [one.text for one in found] == ["The Zustandsspeicher holds it.", "ETWAS", "ETWAS"]
    lacking = ["lacks the term row = Zeile"], ["lacks the terms state pool = Zustandsspeicher, row = Zeile"]
    assert [one.problems for one in found] == [[], *lacking] and len(asked) == 6


def test_modes_of_a_glossary() -> None:
    glossary = Glossary({"row": "Zeile | Zeilen", "name": "Name", "pool": "<0>"})
    text = "The row of the pool is {name}."
    asked = {mode: translated(upper, text, glossary=glossary, glossary_mode=mode)[1] for mode in GlossaryMode}
    hinted = "The Zeile of the <0> is {name}."
    prompts = {mode: queries[0].text_with_terms for mode, queries in asked.items()}
    assert prompts == {GlossaryMode.HINT: hinted, GlossaryMode.CHECK: text, GlossaryMode.ENFORCE: hinted}
    words = {mode: queries[0].required.words for mode, queries in asked.items() if queries[0].required}
    assert words[GlossaryMode.ENFORCE] == ((("Zeile", "Zeilen"), 1),) and not words[GlossaryMode.HINT]


def test_terms_that_the_sampler_added_are_reported() -> None:
    request = TranslationRequest(
        texts=["A row."],
        source="en",
        target="de",
        glossary=Glossary({"row": "Zeile"}),
        glossary_mode=GlossaryMode.ENFORCE,
    )
    plan = TranslationPlan(request, 10, TranslationCache(0))
    while queries := plan.missing():
        plan.add_answers(dict.fromkeys(queries, "Eine (so!) Zeile"), completed=frozenset(queries))
    assert plan.results()[0].problems == ["has terms that were added at its end"]
    assert plan.results()[0].text == "Eine (so Zeile!)", "the term was no part of the sentence"


def test_answers_are_cached_with_their_problems() -> None:
    cache = TranslationCache(9)
    for asked_now in (5, 0):
        texts = ("I see the white dog.", "Go to {x} now")
        found, asked = translated(lambda query: query.text.replace("{x}", ""), *texts, cache=cache)
        assert len(asked) == asked_now and [len(one.problems) for one in found] == [1, 1]


def test_a_translation_with_long_terms_is_not_cached() -> None:
    """A short text may have thousands of terms, whose translations are long."""
    cache = TranslationCache(9)
    for length, asked_now in ((30, 1), (30, 0), (5000, 1), (5000, 1)):
        terms = Glossary({"dog": "D" * length})
        _, asked = translated(upper, "I see the dog.", cache=cache, glossary=terms)
        assert bool(asked) == asked_now


def test_a_rolling_translation_reads_what_came_before() -> None:
    texts = [f"This is sentence number {number} of the book." for number in range(20)]
    found, asked = translated(upper, *texts, mode=ContextMode.ROLLING, context="A book.")
    assert [one.text for one in found] == [*map(loud, texts)]
    assert [len(query.history) for query in asked] == [0, 1, 2, 2, *[4] * 4, *[8] * 8, *[16] * 4]
    assert asked[8].history[0] == ("English", texts[0], loud(texts[0])) and asked[8].context == "A book."


def test_a_rolling_history_leaves_faulty_translations_out_and_is_bounded() -> None:
    texts = [f"This is {'a very ' * 40} long sentence number {number}." for number in range(200)]

    def model(query: Query) -> str:
        return query.text if "number 3." in query.text else upper(query)

    _, asked = translated(model, *texts, mode=ContextMode.ROLLING)
    histories = {query.history for query in asked}
    assert all(sum(len(one.text) + len(one.translation) for one in history) <= 6000 for history in histories)
    assert texts[3] not in {one.text for history in histories for one in history}
    assert asked[-1].history[-1].text == texts[191]


def test_a_cached_answer_belongs_to_its_context() -> None:
    cache = TranslationCache(9)
    for context, count in (("A page. " * 2000, 1), ("A page. " * 2000, 0), ("Another page.", 1)):
        _, asked = translated(upper, "I see the white dog.", cache=cache, context=context)
        assert len(asked) == count


def test_segments_are_counted() -> None:
    with pytest.raises(TooManySegmentsError):
        translated(upper, "a\n" * 5001)
    with pytest.raises(TooManySegmentsError):
        translated(upper, "<b>a" * 5002)  # a segment with many markers is split around them


PROBLEMS = [
    ("I see the black cat.", "Я вижу чёрного кота.", "de", "is not in the script of German"),
    ("I see the black cat.", "Ich sehe die Katze.", "zh-CN", "is not in the script of Chinese"),
    ("I see the black cat.", "  ", "de", "is empty"),
    ("I see the black cat.", "Ich sehe <2>die Katze</2>.", "de", "has <2>, which the text does not have"),
    ("{{n}} of %1$s <1/> cats", "{{n}} %1$s <1/>.", "de", "has no words"),
    ("{n} of %s", "{n} %s", "de", "has no words"),
    ("one of {n}", "1/{n}", "de", ""),
    ("https://a.example/b %d", "1 https://a.example/b %d", "de", ""),
    ("one of https://a.example/b", "https://a.example/b", "de", "has no words"),
    ("I see the black cat. " * 9, "Katze.", "de", "is much shorter than the text"),
    ("I see the black cat.", ">Ich sehe die Katze.", "de", "has >, which the text does not have"),
    ("I see <2>the cat</2>.", "Ich sehe <2>die Katze</2>.", "de", ""),
    ("I see the black cat.", "Katze, " * 9, "de", "repeats itself"),
    ("I see it.", "Ich " + "".join(map(chr, range(0x4E00, 0x4F00))), "de", "is much longer than the text"),
    ("I paid 1,299.50 for it.", "Ich zahlte 1.299,05 dafür.", "de", "lacks the number 1,299.50"),
    ("I paid 1,299.50 for it.", "Ich zahlte 1.299,50 dafür.", "de", ""),
    ("He paid $5.50 and 30% more.", "他付了5.50美元，多了三成。", "zh-CN", ""),
    ("He paid $5.50 and 30% more.", "他付了5.50美元，还多一点。", "zh-CN", "lacks the number 30"),
    ("He paid $5.50 and 30% more.", "他付了钱，多了30%。", "zh-CN", "lacks the number 5.50"),
    ("He paid $5.50 for it.", "Er zahlte dafür 5,5 Dollar.", "de", ""),
    ("He paid $5 million for it.", "他为此付了500万美元。", "zh-CN", ""),
    ("He paid $1.2 million for it.", "他为此付了120万美元。", "zh-CN", ""),
    ("He paid $15 and $120 for it.", "他为此付了十五美元和一百二十美元。", "zh-CN", ""),
    ("He paid 50% of it.", "Er zahlte die Hälfte davon.", "de", ""),
    ("He paid $50 of it.", "Er zahlte die Hälfte davon.", "de", "lacks the number 50"),
    ("那个数一定要小于五，不能更大。", "The number must be < 5, not more.", "en", ""),
    ("我昨天在家里读《红楼梦》。", "I read <Dream of the Red Chamber> at home.", "en", ""),
    ("我昨天在家里读《红楼梦》。", "I read <1>Dream</1> at home.", "en", "has <1>, which the text does not have"),
    ("He paid €7 and 30 % more.", "Er zahlte 7 Euro und 30 Prozent mehr.", "de", ""),
    ("He paid $5.50 for all of it.", "他为此付了5.50欧元。", "zh-CN", "lacks the number $5.50"),
    ("He got 30% of all of it.", "他买了30个篮球和球衣。", "zh-CN", "lacks the number 30%"),
    ("It is 5 miles away from us.", "那里离我们很远。", "zh-CN", "lacks the number 5"),
    ("It is 5 miles away from us.", "那里离我们五英里。", "zh-CN", ""),
    ("From 5% to 5% of it.", "Von 5 % davon.", "de", "lacks the number 5"),
    ("Today it is -20 here, he said.", "Heute sind es hier 20, sagte er.", "de", "lacks the number -20"),
    ("Today it is -20 here, he said.", "他说今天这里零下20。", "zh-CN", ""),
    ("It is 100% sure for you.", "Das ist ganz sicher für dich.", "de", ""),
    ("GitHub", "GitHub", "zh-CN", ""),
    ("New York Times", "New York Times", "zh-CN", ""),
    ("I see the black cat.", "Mi vidas la nigran katon.", "eo", ""),
    ("我看见一只黑色的猫。", "我看见一只黑色的猫。", "en", "is a copy of the text"),
]


@pytest.mark.parametrize(("source", "answer", "target", "expected"), PROBLEMS)
def test_wrong_answers_are_found(source: str, answer: str, target: str, expected: str) -> None:
    assert problem(source, answer, "zh" if target == "en" else "en", target) == expected
    if not expected:
        assert problem(source, answer, "en", target, is_cut=True) == "is much longer than the text"


def test_long_texts_of_numbers_are_checked_quickly() -> None:
    begin = time.process_time()
    amounts = "He paid for it: " + " ".join(f"${number}" for number in range(1001, 1800))
    assert problem(amounts, amounts.replace("He paid for it", "Er zahlte"), "en", "de") == ""
    assert problem("He paid for it " + "1'" * 1990, "Er zahlte " + "1'" * 1990, "en", "de") == ""
    assert time.process_time() - begin < 0.3
