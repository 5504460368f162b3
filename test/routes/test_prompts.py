"""The prompt formats, character by character."""

from __future__ import annotations

import re

import pytest

from routes.request import prompts
from routes.request.bodies import Template
from routes.request.messages import Message
from routes.request.prompts import Think
from rwkv_batch.translation.languages import LANGUAGE_NAMES, language_name
from rwkv_batch.translation.plan import Query
from rwkv_batch.translation.prompts import translation_prompt


def talk(*turns: tuple[str, str]) -> list[Message]:
    return [Message.model_validate({"role": role, "content": text}) for role, text in turns]


TALK = talk(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"))
SNAPSHOTS = {
    Think.OFF: "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye\n\nAssistant: <think>\n</think>",
    Think.ON: "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye\n\nAssistant: <think",
    Think.SHORT: "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye (think a bit)\n\nAssistant: <think",
    Think.MEDIUM: "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye (think)\n\nAssistant: <think",
    Think.LONG: "System: Be kind.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye (think a lot)\n\nAssistant: <think",
}


@pytest.mark.parametrize("think", list(Think))
def test_every_think_mode(think: Think) -> None:
    assert prompts.chat(TALK, think) == SNAPSHOTS[think]


def test_reasoning_may_have_blank_lines_and_the_word_user() -> None:
    assert prompts.answer_stops(Think.OFF, may_call=False) == (0, 261, 24281)
    for think in (Think.ON, Think.SHORT, Think.MEDIUM, Think.LONG):
        stops = prompts.answer_stops(think, may_call=False)
        thought = "First.\n\nUser wants a cat.\n\nSo: a cat."
        assert not any(isinstance(stop, str) and stop in thought for stop in stops)
        assert not {261, 24281} & set(stops)
        assert "\n\nUser:" in stops


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\n\nb", "a\nb"),
        ("a\r\n\r\nb\rc", "a\nb\nc"),
        ("  indented\n    more  ", "  indented\n    more"),
        ("\n\nends\n\n", "ends"),
        ("", ""),
    ],
)
def test_turns_lose_only_blank_lines(text: str, shown: str) -> None:
    assert prompts.chat(talk(("user", text)), Think.ON) == f"User: {shown}".rstrip(" ") + "\n\nAssistant: <think"


def test_roles() -> None:
    turns = talk(("developer", "d"), ("user", "u"), ("tool", '{"a": 1}'), ("function", "2"))
    expected = (
        'System: d\n\nUser: u\n\nUser: Function output:\n{"a": 1}\n\nUser: Function output:\n2\n\nAssistant: <think'
    )
    assert prompts.chat(turns, Think.ON) == expected


def test_a_hint_needs_a_user() -> None:
    assert prompts.chat(talk(("system", "s")), Think.LONG) == "System: s\n\nAssistant: <think"


def test_new_messages_of_a_session() -> None:
    assert prompts.new_messages(TALK) == TALK[3:]
    assert prompts.new_messages(TALK[:2]) == TALK[1:2]
    assert prompts.new_messages(TALK[:1]) == TALK[:1]
    assert prompts.new_messages(TALK[:3]) == []
    longer = [*TALK, *talk(("assistant", "Bye!"), ("system", "Be short."), ("user", "Again"))]
    assert prompts.new_messages(longer) == longer[5:]
    assert prompts.chat([], Think.OFF) == "Assistant: <think>\n</think>"


def test_a_resumed_prompt_begins_with_one_blank_line() -> None:
    assert prompts.continuation_prompt("User: a") == "\n\nUser: a"
    assert prompts.continuation_prompt("\n\nUser: a") == "\n\nUser: a"
    assert prompts.continuation_prompt("\nUser: a") == "\n\n\nUser: a"


def test_tool_results_come_in_the_order_of_their_calls_and_then_the_others() -> None:
    def calls(*names: str) -> Message:
        called = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in names]
        return Message.model_validate({"role": "assistant", "tool_calls": called})

    def result(name: str | None, content: str) -> Message:
        return Message.model_validate({"role": "tool", "tool_call_id": name, "content": content})

    messages = [
        calls("a", "b"),
        *(result(name, text) for name, text in (("x", "1"), ("b", "2"), (None, "3"), ("a", "4"))),
        calls("c"),
        *(result(name, text) for name, text in (("a", "5"), ("c", "6"))),
    ]
    prompt = prompts.chat(messages, Think.ON)
    assert re.findall(r"Function output:\n(\d)", prompt) == ["4", "2", "1", "3", "6", "5"]


def test_a_listing_follows_the_instructions() -> None:
    user, listed = talk(("user", "u")), {"listing": "Tools: f"}
    assert prompts.chat(user, Think.ON, **listed).startswith("System: Tools: f\n\nUser: u\n\n")
    assert prompts.chat(talk(("system", "s")) + user, Think.ON, **listed).startswith(
        "System: s\nTools: f\n\nUser: u\n\n"
    )
    assert prompts.chat(talk(("system", " \n")) + user, Think.ON, **listed).startswith(
        "System: Tools: f\n\nUser: u\n\n"
    )
    assert prompts.chat([], Think.ON, **listed) == "System: Tools: f\n\nAssistant: <think"


def test_an_answer_continues_the_last_message() -> None:
    asked = talk(("user", "u"), ("assistant", "  \n\nOnce\n\n\nupon a "))
    assert prompts.chat(asked, Think.ON, continues=True) == "User: u\n\nAssistant: Once\nupon a "
    assert prompts.chat(talk(("user", "u")), Think.ON, opening="") == "User: u\n\nAssistant:"


def test_a_template_has_its_own_labels_and_stops() -> None:
    template = Template(system="S", user="Q", assistant="A", opening="Well")
    turns = talk(("system", "s"), ("user", "u"))
    assert prompts.chat(turns, Think.OFF, template=template) == "S: s\n\nQ: u\n\nA: Well"
    assert prompts.answer_stops(Think.OFF, may_call=False, template=template) == (0, 261)
    for think, may_call in ((Think.ON, False), (Think.OFF, True)):
        stops = prompts.answer_stops(think, may_call=may_call, template=template)
        assert stops == (0, "\n\nQ:", "\n\nS:", "\n\nA:")
    assert prompts.think_mode(True) is Think.ON and prompts.think_mode(False) is Think.OFF


def test_fill_in_the_middle_and_translation() -> None:
    assert prompts.fill_in_the_middle("def f(", "):") == "✿prefix✿✿suffix✿):✿middle✿def f("
    assert translation_prompt(Query("en", "zh", "a\n\nb")) == "English: a\nb\n\nChinese:"


def test_languages_by_code() -> None:
    assert len(LANGUAGE_NAMES) >= 100
    assert len(set(LANGUAGE_NAMES.values())) == len(LANGUAGE_NAMES)
    named = {
        "en": "English", "zh": "Chinese", "zh-CN": "Chinese", "zh-TW": "Traditional Chinese",
        "zh_Hant": "Traditional Chinese",
        "ja": "Japanese", "ko": "Korean", "fr": "French", "de": "German", "es": "Spanish", "ru": "Russian",
        "pt-BR": "Portuguese", "EN-us": "English", "iw": "Hebrew", "tlh": "tlh",
    }  # fmt: skip
    assert {code: language_name(code) for code in named} == named
