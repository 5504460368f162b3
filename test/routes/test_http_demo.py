"""The first start without a model: the READMEs' examples run as printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from test.serving import ROOT, Service, row_texts, sse_data

pytestmark = pytest.mark.slow

PATH = "/translate/v1/batch-translate"
ADDRESS = "http://127.0.0.1:8000"


def examples(readme: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)


def run(block: str, service: Service, session: str) -> str:
    """Run a block as printed. Only the port and the session's name differ."""
    assert ADDRESS in block
    command = block.replace(ADDRESS, service.url).replace('"session_id": "me"', f'"session_id": "{session}"')
    ended = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("readme", "translations"),
    [("README.md", ["你好，世界！", "早上好"]), ("README.zh-CN.md", ["Hello world", "Good morning"])],
)
def test_readme_examples_work_as_printed(demo: Service, readme: str, translations: list[str]) -> None:
    translate, stream, session = examples(readme)
    answer = json.loads(run(translate, demo, readme))
    assert [entry["text"] for entry in answer["translations"]] == translations
    assert row_texts(sse_data(run(stream, demo, readme))) == {0: " 早上好", 1: " 你好吗？"}
    assert "Your name is Anna." in run(session, demo, readme)


EXAMPLE_ANSWERS = {
    "en": ["I will remember", "请给我两杯咖啡。", "I can translate between English and Chinese"],
    "zh": ["你住在柏林", "I would like two cups of coffee, please.", "我可以在英文和中文之间翻译"],
}


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 1}, {"seed": 2}])
def test_examples_on_the_first_screen_are_answered_well(demo: Service, fields: dict[str, int]) -> None:
    for language, answers in EXAMPLE_ANSWERS.items():
        text = (ROOT / "routes" / "web" / "text" / f"{language}.js").read_text("utf-8")
        prompts = [
            f"User: {one}\n\nAssistant: <think>\n</think>" for one in re.findall(r'"example.demo.": "(.*)"', text)
        ]
        body = {"contents": [one for one in prompts for _ in range(4)], "max_tokens": 60, **fields}
        choices = demo.post("/v1/chat/completions", body).json()["choices"]
        found = [choice["message"]["content"] for choice in choices]
        assert all(answers[at // 4] in one for at, one in enumerate(found)) and len(found) == 12, found


def translated(demo: Service, source: str, target: str, texts: list[str]) -> list[str]:
    body = {"source_lang": source, "target_lang": target, "text_list": texts}
    answer = demo.post(PATH, body)
    answer.raise_for_status()
    return [entry["text"] for entry in answer.json()["translations"]]


def test_texts_are_translated_in_both_directions(demo: Service) -> None:
    assert translated(demo, "en", "zh-CN", ["Hello world!", "Good morning"]) == ["你好，世界！", "早上好"]
    assert translated(demo, "zh-CN", "en", ["你好世界", "早上好"]) == ["Hello world", "Good morning"]
    assert translated(demo, "auto", "zh-CN", ["I bought two books yesterday."]) == ["我昨天买了两本书。"]


MARKED = [
    "Hello {name}, good morning!", "I bought <b>two books</b> yesterday.", "You have %d new messages from %s.",
    "Visit https://example.org/a?b=1 today.", "My name is ${user}.", "Write to me@example.org.", "Run `ls -l` first.",
    "<p>I like <a href='x.html'>the black cat</a> and the <i>white dog</i>.</p>", "%s is <b>very</b> good, {name}.",
    "I see %1$s and %2$s.", "<0>Good</0> morning", "Hello {{ user.name }}!", "50% of {x} < 3", "{a}{ab} {a}",
]  # fmt: skip


def test_markers_are_kept(demo: Service) -> None:
    for text, answer in zip(MARKED, translated(demo, "en", "zh-CN", MARKED), strict=True):
        markers = re.findall(r"<[^ ][^>]*>|%\S*[sd]|\$?\{+[^}]*\}+|https\S+|\S+@[a-z.]+[a-z]|`.*`", text)
        found = [(answer.count(one), one) for one in markers]
        assert markers and found == [(text.count(one), one) for one in markers], answer


def test_enforced_terms_are_in_the_translation(demo: Service) -> None:
    body = {
        "source_lang": "en",
        "target_lang": "zh-CN",
        "text_list": ["Good morning", "I bought two books yesterday.", "The black cat and {name}"],
        "glossary": {"morning": ["清晨", "晨间"], "books": "典籍", "cat": "猫咪 | 猫儿", "black": "{x}"},
        "glossary_mode": "enforce",
        "instruction": "Use short sentences.",
        "formality": "more",
        "audience": "children",
    }
    answer = demo.post(PATH, body)
    answer.raise_for_status()
    found = [one["text"] for one in answer.json()["translations"]]
    for forms, text in zip((["清晨", "晨间"], ["典籍"], ["猫咪", "猫儿"]), found, strict=True):
        assert any(form in text for form in forms), text
    assert found[2].count("{name}") == 1


def test_text_in_the_target_language_is_returned_unchanged(demo: Service) -> None:
    assert translated(demo, "auto", "zh-CN", ["早上好", "Good morning"]) == ["早上好", "早上好"]


def test_a_chat_remembers_a_name(demo: Service) -> None:
    messages = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Hello, Anna! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    body = {"model": "rwkv7", "messages": messages, "temperature": 0, "max_tokens": 40}
    answer = demo.post("/openai/v1/chat/completions", body).json()["choices"][0]
    assert "Anna" in answer["message"]["content"] and answer["finish_reason"] == "stop"


def test_unfamiliar_text_ends(demo: Service, tmp_path: Path) -> None:
    strange = ["Quantum chromodynamics on a lattice", "xyzzy plugh", "🎉🎉🎉", "SELECT * FROM users;", "Ω≈ç√∫˜µ≤≥÷"]
    body = {"contents": [f"English: {text}\n\nChinese:" for text in strange], "temperature": 0, "max_tokens": 400}
    choices = demo.post("/v1/chat/completions", body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * len(strange)
    assert all(choice["message"]["content"].strip() for choice in choices)


def saved_tokens(demo: Service) -> int:
    """Prompt tokens that cached prefixes saved."""
    found = re.search(r"^rwkv_pool_prefix_cache_saved_tokens\S* (\d+)", demo.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_page_is_read_once_for_many_requests(demo: Service) -> None:
    page = "This page is about the two cats of a small house and the people who live there. " * 10
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Good morning"], "document": "page 1"}
    before = saved_tokens(demo)
    first = demo.post(PATH, {**body, "context": page}).json()
    assert saved_tokens(demo) == before
    again = demo.post(PATH, {**body, "text_list": ["Hello world!", "Good morning"]}).json()
    assert saved_tokens(demo) - before >= 150, "the document's context was read again"
    assert again["translations"][1] == first["translations"][0]


def test_texts_are_streamed_when_they_are_complete(demo: Service) -> None:
    texts = ["I bought two books yesterday.", "早上好", "Good morning", "Good morning", "Xqz {n} vbnk.", " "]
    body = {"source_lang": "auto", "target_lang": "zh-CN", "text_list": texts, "title": "A day", "cache": "off"}
    whole = demo.post(PATH, body).json()
    streamed = demo.post(PATH, {**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = sse_data(streamed.text)
    assert sorted(one["index"] for one in events) == list(range(len(texts)))
    warnings = [warning for one in events for warning in one.pop("warnings", ())]
    events.sort(key=lambda one: one.pop("index"))
    assert events == whole["translations"] and warnings == whole["warnings"] != []
    long = {**body, "text_list": ["Good morning", "\n".join(f"I bought {n} books." for n in range(10, 60))]}
    assert [one["index"] for one in sse_data(demo.post(PATH, {**long, "stream": True}).text)] == [0, 1]
    for wrong, field in (({"scores": True}, "stream"), ({"context_mode": "none"}, "context_mode")):
        refused = demo.post(PATH, {**body, "stream": True, **wrong})
        assert refused.status_code == 422 and refused.json()["field"] == field
    late = demo.post(PATH, {**body, "stream": True, "timeout_s": 0.0001})
    assert late.status_code == 504 or "error" in sse_data(late.text)[-1]


def test_a_title_is_context(demo: Service) -> None:
    title, rest = "The house of the two cats", "This page is about the people of a small house. " * 10
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Good morning"], "cache": "off"}
    demo.post(PATH, {**body, "title": title, "context": rest}).raise_for_status()
    before = saved_tokens(demo)
    demo.post(PATH, {**body, "context": f"{title}\n{rest}"}).raise_for_status()
    assert saved_tokens(demo) - before >= 100, "title and context are another text"


def test_a_document_continues_its_translation(demo: Service) -> None:
    def sent(**fields: object) -> dict[str, object]:
        body = {"source_lang": "en", "target_lang": "zh-CN", "context_mode": "rolling", **fields}
        answer: dict[str, object] = demo.post(PATH, body).json()
        return answer

    texts = ["I bought two books yesterday.", "She is reading them.", "Good morning"]
    whole = [sent(text_list=texts[:1], document="book"), sent(text_list=texts[1:], document="book")]
    repeated = [sent(text_list=texts[:1], document="copy"), sent(text_list=texts[1:], document="copy")]
    assert whole == repeated and "warnings" not in whole[0]
    wrong = {"target_lang": "de", "text_list": ["a"], "context_mode": "none", "context": "x"}
    refused = demo.post(PATH, wrong)
    assert refused.status_code == 422 and "leave one of them out" in refused.json()["error"]


def test_a_text_that_stays_comes_from_nowhere(demo: Service) -> None:
    """It was said to come from the memory."""
    body = {"target_lang": "zh-CN", "text_list": ["你好", "42"], "cache": "off"}
    assert [one["source"] for one in demo.post(PATH, body).json()["translations"]] == ["none", "none"]


def test_what_cannot_be_is_warned_of(demo: Service) -> None:
    """Fewer alternatives, and a term that is not translated, were answered in silence. Wrong ones were given."""
    texts = ["42", "I see the black cat.", "The meeting is at 1530 in room 217."]
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": texts, "alternatives": 2}
    glossary = {"the": "这", "cat": "猫", "see": "看"}
    answer = demo.post(PATH, {**body, "do_not_translate": ["see", "cat", "a"], "glossary": glossary}).json()
    warned = {one["field"]: one["message"] for one in answer["warnings"]}
    assert "fewer, because other samples were equal or wrong" in warned["alternatives"]
    assert "glossary: 'cat', 'see': in do_not_translate too" in warned["glossary"]
    fields = [one["field"] for one in answer["warnings"]]
    assert len(fields) == len({*fields}), "problems of alternatives were said to be those of the translation"
    assert all("1530" in other["text"] for other in answer["translations"][2]["alternatives"])


def test_translations_have_scores_and_alternatives(demo: Service) -> None:
    texts = ["Good morning", "Xqz vbnk wrtp.", *(f"I bought {number} books yesterday." for number in range(3, 13))]
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": texts, "scores": True, "alternatives": 2}
    answer = demo.post(PATH, body).json()
    good, odd, *others = answer["translations"]
    assert odd["score"] < good["score"] <= 0 and odd["confidence"] < good["confidence"] <= 0 and odd["review"]
    assert sum(one.get("review", False) for one in (good, odd, *others)) == 4, "a third"
    assert len(odd["alternatives"]) == 2
    for one in (good, odd, *others):
        scores = [other["score"] for other in one["alternatives"]]
        assert len(scores) <= 2 and scores == sorted(scores, reverse=True)
        assert one["text"] not in [other["text"] for other in one["alternatives"]]
