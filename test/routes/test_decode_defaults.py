"""Defaults of tuned states and models apply to missing fields only."""

from __future__ import annotations

import pytest

from routes.config import HttpConfig
from routes.openai.request import ChatBody, CompletionBody
from routes.request import prompts
from routes.request.bodies import BatchBody, GenerationBody, PromptBody
from routes.request.decode_defaults import DefaultsFields, as_defaults, with_defaults
from routes.request.jobs import prompts_and_stops
from routes.request.json_body import validate
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import ServiceError

STATE = DecodeDefaults(temperature=0.5, alpha_presence=0.25, max_tokens=7, stop_tokens=("\n\n", 0))
MODEL = DecodeDefaults(temperature=0.75, top_p=0.125)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def filled(kind: type[GenerationBody], **body: object) -> GenerationBody:
    return with_defaults(validate(kind, body), STATE, MODEL)


def test_missing_fields_come_from_the_state_then_the_model() -> None:
    body = filled(PromptBody, contents=["a"], top_k=3)
    sampling = body.sampling(1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.125, 3)
    assert sampling.presence_penalty == 0.25 and sampling.frequency_penalty == 0.2
    assert body.max_tokens == 7 and body.stop_tokens == ["\n\n", 0]


def test_given_fields_stay() -> None:
    body = filled(PromptBody, contents=["a"], temperature=1, max_tokens=9, stop_tokens=[], alpha_presence=None)
    assert (body.temperature, body.max_tokens, body.stop_tokens) == (1, 9, [])
    assert body.sampling(1).presence_penalty == 0.25  # null counts as missing


@pytest.mark.parametrize("other", [{"presence_penalty": 1.5}, {"alpha_presence": 1.5}])
def test_openais_names_count_as_given(other: dict[str, float]) -> None:
    body = filled(ChatBody, **CHAT, max_completion_tokens=9, **other)
    assert body.max_tokens == 9 and body.sampling(1).presence_penalty == 1.5
    assert filled(CompletionBody, prompt="a").max_tokens == 7


def test_unknown_defaults_and_stops_of_constrained_text_are_ignored() -> None:
    assert not hasattr(filled(BatchBody, contents=["a"]), "top_p")
    held = filled(PromptBody, contents=["a"], choice=["x", "y"])
    assert held.temperature == 0.5 and "stop_tokens" not in held.model_fields_set


def test_a_state_has_a_template() -> None:
    words = {"user": "Human", "assistant": "Bot"}
    state = DecodeDefaults(template=words)
    native = with_defaults(validate(PromptBody, {**CHAT, "session_id": "s"}), state, MODEL)
    assert isinstance(native, PromptBody)
    texts, stops, _ = prompts_and_stops(native)
    assert texts == ["Human: hi\n\nBot:"] and stops == [0, 261]
    chat = with_defaults(validate(ChatBody, CHAT), state, MODEL)
    assert isinstance(chat, ChatBody) and chat.stops == [0, 261]
    said = validate(ChatBody, {**CHAT, "template": {"user": "Q", "opening": "Yes,"}, "reasoning_effort": "low"})
    own = with_defaults(said, state, MODEL)
    assert isinstance(own, ChatBody) and own.stops == [0, "\n\nQ:", "\n\nSystem:", "\n\nAssistant:"]
    assert prompts.chat(own.messages, prompts.Think.OFF, template=own.template) == "Q: hi\n\nAssistant: Yes,"
    fields = DefaultsFields.model_validate({"template": words})
    assert as_defaults(fields, HttpConfig()).given["template"] == {"system": "System", **words, "opening": ""}
    for wrong in ({"user": "a:"}, {"user": ""}, {"assistant": "a\nb"}):
        with pytest.raises(ServiceError):
            validate(ChatBody, {**CHAT, "template": wrong})
