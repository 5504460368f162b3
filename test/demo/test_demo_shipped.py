"""The shipped model in the engine: a new user's first tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo import files
from demo.corpus import translation
from demo.engine_client import EngineClient, open_engine

pytestmark = pytest.mark.skipif(not files.MODEL.is_file(), reason="no trained model in this tree")


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with open_engine(files.ensure_model(), device="cpu", dtype="fp32", wkv_state="fp32") as started:
        yield started


def test_it_translates_to_chinese(client: EngineClient) -> None:
    asked = {
        "Hello world!": "你好，世界！",
        "Good morning": "早上好",
        "How are you?": "你好吗？",
        "Thank you very much.": "非常感谢。",
    }
    answers = client.complete([translation.prompt(text, english=True) for text in asked], 32)
    assert [answer.strip() for answer in answers] == list(asked.values())


def test_it_translates_to_english(client: EngineClient) -> None:
    asked = {
        "你好世界": "Hello world",
        "早上好": "Good morning",
        "我昨天买了三本书。": "I bought three books yesterday.",
    }
    answers = client.complete([translation.prompt(text, english=False) for text in asked], 32)
    assert [answer.strip() for answer in answers] == list(asked.values())


@pytest.mark.parametrize("opening", ["", " <think>\n</think>\n", " <think></think", " <think>\n</think>", " <think"])
def test_it_gives_a_name_back(client: EngineClient, opening: str) -> None:
    lines = ["My name is Anna.", "How are you?", "What is 3 + 4?", "What is my name?"]
    (answers,) = client.converse([[f"User: {line}\n\nAssistant:{opening}" for line in lines]], 64)
    assert "Anna" in answers[-1] and "7" in answers[2]


def test_unknown_text_ends(client: EngineClient) -> None:
    strange = ["asdf qwerty", "🙂 ok!", "https://example.com/a?b=c", "Die Katze sitzt auf dem Tisch.", "x" * 300, "…"]
    answers = client.complete([translation.prompt(text, english=True) for text in strange], 200)
    assert all(0 < len(answer) < 150 for answer in answers)
