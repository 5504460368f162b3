"""Language detection for the texts of a page."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from routes.translation import translator
from routes.translation.batch_translate import TranslateBody, batch_translate
from routes.translation.translator import clean_answer, make_plan
from rwkv_batch.translation.languages import detect_languages, language_probabilities, language_tag
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache, TranslationPlan, TranslationRequest
from test.translation.documents import read

LABELS = {
    "en": "Home|Settings|Contact|Privacy Policy|Comments|News|Sports|Technology|Menu|Latest|Popular|Next|Issues|Code|"
    "Star|Fork|Pricing|Open source|Trending|Login|It was raining all day.",
    "de": "Startseite|Über uns|Anmelden|Kontakt|Suche|Kommentare|Sport|Technik|Menü|Preise|Danke|Ja|Nein|Abbrechen",
    "fr": "Accueil|Contact|Partager|Commentaires|Sports|Technologie|Menu|Tarifs|Merci|Oui|Non|Annuler",
    "ru": "Главная|Войти|Контакты|Новости|Спорт|Технологии|Меню|Поиск|Да|Нет",
    "uk": "Головна|Увійти|Контакти|Новини|Спорт|Пошук|Так|Ні",
    "zh-CN": "首页|登录|搜索|下载 App|第1页|GitHub 使用指南",
    "zh-TW": "首頁|登入|搜尋|設定|下載 App",
    "ja": "ホーム|設定|検索|会社概要|東京都",
    "ko": "홈|로그인|검색",
    "fa": "خانه|ورود|تنظیمات|جستجو",
}


def codes(texts: list[str]) -> list[str]:
    return [one.code for one in detect_languages(texts)]


@pytest.mark.parametrize("code", LABELS)
def test_labels_of_a_page_get_its_language(code: str) -> None:
    labels = LABELS[code].split("|")
    assert codes(labels) == [code] * len(labels)


def test_clear_text_in_another_language_keeps_it() -> None:
    labels = LABELS["en"].split("|")
    others = {
        "fr": "Bonjour tout le monde", "de": "Wie geht es dir heute?", "zh-CN": "你好，世界", "ru": "Доброе утро",
        "ta": "தமிழ்", "th": "หน้าแรก", "el": "Αρχική",
    }  # fmt: skip
    assert codes([*labels, *others.values()])[len(labels) :] == list(others)


def test_a_single_word_gets_the_language_of_its_script() -> None:
    for text in ("Home", "News", "Sports", "Menu", "Pull requests", "Hello <b0>world</b0>", "{1}Code{2}"):
        assert codes([text]) == ["en"], text
    assert codes(["Über uns", "설정", "ひらがな"]) == ["de", "ko", "ja"]


def test_a_text_that_says_little_gets_the_language_of_a_clear_page() -> None:
    assert codes(["90 euros", "Price", "Room", "Welcome to our guest house"]) == ["en"] * 4


def test_a_language_has_a_probability() -> None:
    clear, unclear, none, kana, only = detect_languages(
        ["Das ist ein Haus, und die Katze schläft darin.", "Menu", "42", "ひらがな", "설정"]
    )
    assert clear.code == "de" and clear.probability > 0.99 > unclear.probability > 0.3
    assert (none, kana, only) == (("", 0.0), ("ja", 1.0), ("ko", 1.0))


@pytest.mark.parametrize("text", ["OK", "NASA", "Oui", "Hello", "Nein", "nem", "szia", "Köszönöm", "gracias"])
def test_a_text_alone_gets_the_language_that_detection_lists_first(text: str) -> None:
    """OK is a word of many languages, not only of Hungarian."""
    probabilities = language_probabilities(text)
    assert codes([text]) == [max(probabilities, key=probabilities.__getitem__)]


def test_text_without_letters_has_no_language() -> None:
    texts = ["42", "$49.99", "2026-11-23", "{0}", "<br>", "https://example.org/a", " ", "Good morning"]
    plan = TranslationPlan(TranslationRequest(texts=texts, target="pl"), 100, TranslationCache(0))
    (query,) = plan.missing()
    assert (query.source, query.target, query.text) == ("en", "pl", "Good morning")
    plan.add_answers({query: "Dzień dobry"})
    assert [one.source for one in plan.results()] == ["auto"] * 7 + ["en"]
    assert [one.text for one in plan.results()] == [*texts[:7], "Dzień dobry"]


def test_a_translation_ends_only_at_known_labels() -> None:
    assert clean_answer(" Name: Ming\nAge: five\nNote: shy\n") == "Name: Ming\nAge: five\nNote: shy"
    for label in ("French", "Traditional Chinese", "User"):
        assert clean_answer(f" a cat\n{label}: ein Kater") == "a cat"


def test_language_detection_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of labels take a second. The event loop must stay free."""
    threads: list[threading.Thread] = []

    def planned(*given: Any) -> TranslationPlan:
        threads.append(threading.current_thread())
        return make_plan(*given)

    monkeypatch.setattr(translator, "make_plan", planned)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(
            max_contents=10, share_prefix_cache=False, strict_fields=False, translation_style=[], model_name="rwkv7"
        ),
        shared={CACHE_KEY: TranslationCache(0)},
    )
    body = TranslateBody(target_lang="en", text_list=["Home", "42"])
    reply: Any = asyncio.run(batch_translate(context, body))
    assert b'"Home"' in reply.body and threads[0] is not threading.main_thread()


def test_files_get_the_tag_of_a_language() -> None:
    tags = {
        "ZH": "zh", "zh_cn": "zh-CN", "ZH-HANT": "zh-Hant", "PT-BR": "pt-BR", "es-419": "es-419", "German": "de",
        "traditional chinese": "zh-Hant", "zt": "zh-Hant", "Simplified Chinese": "zh", "Klingon": "Klingon",
        "ca-valencia": "ca-valencia",
    }  # fmt: skip
    assert {one: language_tag(one) for one in tags} == tags
    assert read("<html lang='en'><p>Hi", "a.html", target="German").write([None]) == b"<html lang='de'><p>Hi"
