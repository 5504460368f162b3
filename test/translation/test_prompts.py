"""Prompts of translations: their forms, and the form that a file's name chooses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from programs.settings import SettingsError
from programs.settings.values import language_styles
from routes.config import HttpConfig
from routes.translation import translator
from routes.translation.translator import TranslationFields
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.tokenizer import Tokenizer
from rwkv_batch.translation.context import Example
from rwkv_batch.translation.glossary import GlossaryMode
from rwkv_batch.translation.plan import CACHE_KEY, Query, TranslationRequest
from rwkv_batch.translation.prompt_forms import PromptForm, prompt_form
from rwkv_batch.translation.prompts import prompt_stops, shared_prompt, translation_prompt

TERMS = (("cat", "Kater | Katze"), ("dog", "Hund"))


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("/models/rwkv7-g1a-2.9b-20250924-ctx4096.pth", PromptForm.CHAT),
        ("rwkv7-g1-translate-7b.safetensors", PromptForm.LABELS),
        ("RWKV-x070-World-1.5B-v3-20250127-ctx4096.pth", PromptForm.LABELS),
        ("/cache/rwkv7-demo-8a7cb4c28cd8.safetensors", PromptForm.TERM_LIST),
        ("/g1/own.pth", PromptForm.LABELS),
    ],
)
def test_a_file_name_chooses_the_form(file: str, form: PromptForm) -> None:
    assert prompt_form("auto", file) is form
    assert prompt_form("chat", file) is PromptForm.CHAT


@pytest.mark.parametrize(
    ("form", "shared", "prompt"),
    [
        (
            PromptForm.LABELS,
            "A pet shop.\n\nEnglish: Hi.\n\nGerman: Hallo.\n\n",
            "English: The Kater\nsees a Hund.\n\nGerman:",
        ),
        (
            PromptForm.TERM_LIST,
            "A pet shop.\n\nEnglish: Hi.\n\nGerman: Hallo.\n\n",
            "Terms: cat = Kater / Katze; dog = Hund\n\nEnglish: The cat\nsees a dog.\n\nGerman:",
        ),
        (
            PromptForm.CHAT,
            "System: Translate every text from English into German. Answer with the translation only.\nA pet shop.\n\n"
            "User: Hi.\n\nAssistant: Hallo.\n\n",
            "User: Terms: cat = Kater / Katze; dog = Hund\nThe cat\nsees a dog.\n\nAssistant: <think>\n</think>\n",
        ),
    ],
)
def test_forms_have_context_terms_and_earlier_translations(form: PromptForm, shared: str, prompt: str) -> None:
    history = (Example("English", "Hi.", "Hallo."),)
    text = "The cat\n\nsees a dog."
    query = Query("en", "de", text, "A pet shop.", history, terms=TERMS, mode=GlossaryMode.HINT)
    assert (shared_prompt(query, form), translation_prompt(query, form)) == (shared, prompt)
    assert "Hund" not in translation_prompt(Query("en", "de", text, terms=TERMS), form), "check: not at first"
    assert prompt_stops(query, form)[0] == "\n\n"


@pytest.mark.parametrize(
    ("target", "style", "said"),
    [("de-AT", "", "Use Sie, please."), ("zh-TW", "", "A = B"), ("zh", "", ""), ("German", "Use du.", "Use du.")],
)
def test_a_request_without_a_style_has_its_languages(
    target: str, style: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(request: TranslationRequest, *_: Any) -> None:
        raise ServiceError(ErrorKind.OVERLOADED, request.style)

    monkeypatch.setattr(translator, "make_plan", planned)
    config = HttpConfig(translation_style=language_styles("de=Use Sie, please.; Traditional Chinese = A = B"))
    context = cast(Any, SimpleNamespace(config=config, shared={CACHE_KEY: None}))
    body = TranslationFields()
    request = TranslationRequest(texts=["a"], source="en", target=target, style=style)
    with pytest.raises(ServiceError, match=f"^{said}$"):
        asyncio.run(translator.translate(context, request, body, "", "text"))


@pytest.mark.parametrize("wrong", ["de", "de=", "de= ", "Klingon=Shout.", "de=" + "x" * 1001])
def test_a_wrong_default_style_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="must be LANGUAGE=INSTRUCTION"):
        language_styles(wrong)
    with pytest.raises(SettingsError, match="two instructions for German"):
        language_styles("de=Use Sie.; German=Use du.")


def test_a_pages_context_is_formatted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[Query] = []
    monkeypatch.setattr(
        translator, "shared_prompt", lambda query, form: formatted.append(query) or shared_prompt(query, form)
    )
    context = cast(Any, SimpleNamespace(tokenizer=Tokenizer(), config=HttpConfig()))
    body = TranslationFields()
    rows = translator._rows(context, [Query("en", "de", text, "A pet shop.") for text in "abc"], body, "text_list")
    assert len(formatted) == 1 and len({tuple(row.prompt[: row.cached_tokens]) for row in rows}) == 1
