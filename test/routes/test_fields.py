"""Fields of all bodies: fixed names, refused values, constraints, escapes."""

from __future__ import annotations

from typing import Any

import pytest

from programs.settings import parse_settings
from routes.config import HttpConfig
from routes.openai.request import ChatBody, CompletionBody
from routes.request import prompts
from routes.request.bodies import BatchBody, GenerationBody, MixedState, PromptBody, with_mixture_weights
from routes.request.decode_defaults import DefaultsFields, as_defaults, with_defaults
from routes.request.fields import describe_value, unescaped
from routes.request.jobs import prompts_and_stops
from routes.request.json_body import validate
from routes.request.validation import MAX_WARNINGS, validated
from routes.request_context import RequestContext, cache_tenant, own_id, reachable_ids, set_current_request
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.errors import ErrorKind, ServiceError
from sampling.grammar.constraint import THINK_END, Constraint, Form
from sampling.params import SamplingParams

CONTENTS: dict[str, Any] = {"contents": ["a"]}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def refusal(call: Any, *arguments: Any) -> tuple[str | None, str]:
    with pytest.raises(ServiceError) as caught:
        call(*arguments)
    assert caught.value.info.kind is ErrorKind.INVALID_FIELD
    return caught.value.info.field, caught.value.info.message


@pytest.mark.parametrize(
    ("field", "value", "form", "source"),
    [
        ("grammar", 'start: "a"', Form.LARK, 'start: "a"'),
        ("regex", "a+", Form.REGEX, "a+"),
        ("choice", ["a", "é"], Form.CHOICE, '["a","é"]'),
        ("json_schema", {"type": "é"}, Form.JSON_SCHEMA, '{"type":"é"}'),
        ("json_schema", False, Form.JSON_SCHEMA, "false"),
    ],
)
def test_a_constraint_has_its_form_and_field(field: str, value: Any, form: Form, source: str) -> None:
    plain = validate(PromptBody, {**CONTENTS, field: value})
    assert plain.constraint == Constraint(form=form, source=source, field=field, after="")
    thinking = validate(PromptBody, {**TALK, "enable_think": True, field: value})
    assert thinking.constraint == Constraint(form=form, source=source, field=field, after=THINK_END)
    assert validate(PromptBody, {**CONTENTS, "enable_think": True}).constraint is None


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    body = validate(PromptBody, {**CONTENTS, "json_schema": schema})
    expected = "json_schema: is nested too deeply; nest fewer schemas or use $ref"
    assert refusal(lambda: body.constraint) == ("json_schema", expected)


@pytest.mark.parametrize(
    ("field", "refused", "allowed"),
    [
        ("response_format", {"type": "json_object"}, [{"type": "text"}, None, {}]),
        ("tools", [1], [[], None]),
        ("tool_choice", "required", ["none", "auto", ""]),
        ("n", 2, [1, None]),
        ("logprobs", True, [False, None]),
        ("top_logprobs", 1, [0]),
        ("logit_bias", {"1": 2}, [{}]),
    ],
)
def test_fields_of_other_routes_are_refused_unless_they_change_nothing(
    field: str, refused: Any, allowed: list[Any]
) -> None:
    name, message = refusal(validate, PromptBody, {**CONTENTS, field: refused})
    remedy = "json_schema" if field == "response_format" else "/openai/v1/chat/completions"
    assert name == field and remedy in message
    for value in allowed:
        validate(PromptBody, {**CONTENTS, field: value})


def test_numbers_may_be_texts_where_a_route_allows_it() -> None:
    weights = validate(PromptBody, {**CONTENTS, "mrss_gatingweight": ["1", 2, "-1e3"]}).mrss_gatingweight
    assert weights == [1.0, 2.0, -1000.0]
    for wrong in ("one", "1" * 33, "1001", "nan"):
        field, message = refusal(validate, PromptBody, {**CONTENTS, "mrss_gatingweight": [wrong]})
        assert field == "mrss_gatingweight[0]" and message.endswith(f"got {describe_value(wrong)}")
    assert refusal(validate, PromptBody, {**CONTENTS, "temperature": "1"})[0] == "temperature"


def test_weights_belong_to_a_mixture() -> None:
    body = validate(PromptBody, {**CONTENTS, "state": "mixed", "mrss_gatingweight": [3, 4]})
    weighted = with_mixture_weights(body, [("poet", 1.0), ("", 1.0)])
    assert weighted.states == [MixedState(name="poet", weight=3), MixedState(name="", weight=4)]
    assert weighted.state is None
    expected = "mrss_gatingweight: must be a weight for each of the mixture's 1 states, got 2"
    assert refusal(with_mixture_weights, body, [("poet", 1.0)]) == ("mrss_gatingweight", expected)
    assert "each of a mixture that `model` or `state` names, got 2" in refusal(with_mixture_weights, body, [])[1]
    both = {**CONTENTS, "states": [{"name": "poet"}]}
    assert refusal(validate, PromptBody, {**both, "state": "x"}) == (
        "states",
        "state and states cannot be given together; leave one of them out",
    )
    assert refusal(validate, PromptBody, {**both, "mrss_gatingweight": [1]})[0] == "mrss_gatingweight"


def test_alpha_fields_take_precedence_over_openais_names() -> None:
    def penalties(**fields: float) -> tuple[float, float, float]:
        sampling = validate(PromptBody, {**CONTENTS, **fields}).sampling(7)
        assert sampling.seed == 7
        return sampling.presence_penalty, sampling.frequency_penalty, sampling.penalty_decay

    assert penalties() == (2.0, 0.2, 0.996)
    assert penalties(presence_penalty=0.5, frequency_penalty=0.25, alpha_decay=0.5) == (0.5, 0.25, 0.5)
    alphas = {"alpha_presence": 1.0, "alpha_frequency": 0.0}
    assert penalties(presence_penalty=0.5, frequency_penalty=0.25, **alphas) == (1.0, 0.0, 0.996)


def test_a_route_may_sample_by_temperature_only() -> None:
    body = validate(BatchBody, {**CONTENTS, "temperature": 0.25})
    assert body.sampling(7) == SamplingParams(temperature=0.25, seed=7)


def test_several_constraints_exclude_each_other() -> None:
    given = {"grammar": "a", "regex": "a", "json_schema": {}}
    assert refusal(validate, PromptBody, CONTENTS | given) == (
        "json_schema",
        "grammar and regex and json_schema exclude each other",
    )


def test_caches_are_shared_only_if_the_service_says_so() -> None:
    set_current_request(RequestContext(owner="key"))
    assert cache_tenant(HttpConfig(share_prefix_cache=False)) == "key"
    assert cache_tenant(parse_settings(["--share-prefix-cache", "true"], {}).http) == ""
    assert reachable_ids("s") == (own_id("s"), "s") and own_id("s") != "s"
    assert reachable_ids(own_id("s")) == (own_id(own_id("s")),)
    set_current_request(RequestContext())
    assert cache_tenant(HttpConfig(share_prefix_cache=False)) == "" and reachable_ids("s") == ("s",)


def test_an_ignored_field_is_reported_with_its_place() -> None:
    def reported(body: dict[str, Any], model: Any = PromptBody, **options: Any) -> list[dict[str, str]]:
        context = RequestContext()
        set_current_request(context)
        validated(model, body, **options)
        return context.warnings

    unknown = "is not a field of this request; the nearest known name is temperature; it was ignored"
    assert reported({**CONTENTS, "temprature": 1}) == [{"field": "temprature", "message": f"temprature: {unknown}"}]
    assert reported({**CONTENTS, "temprature": None, "other": 1}, others=["other"]) == []
    nested = {**TALK, "template": {"usr": "a"}, "stream_options": {"x": 1}}
    nested["messages"] = [*TALK["messages"], {"role": "user", "content": "a", "nmae": "b"}]
    assert [one["message"] for one in reported(nested)] == [
        "messages[1].nmae: is not a field of messages[1]; the nearest known name is name; it was ignored",
        "template.usr: is not a field of template; the nearest known name is user; it was ignored",
        "stream_options.x: is not a field of stream_options; it was ignored",
    ]
    assert reported(TALK | {"user": "u1"}, ChatBody) == [{"field": "user", "message": "user: is accepted and ignored"}]
    many = reported({**CONTENTS, **{f"x{number}": 1 for number in range(MAX_WARNINGS + 1)}})
    assert len(many) == MAX_WARNINGS + 1
    assert many[-1] == {"field": "", "message": "more than 16 fields are unknown or ignored; these are the first"}
    assert len(reported({**CONTENTS, **{f"x{number}": 1 for number in range(MAX_WARNINGS)}})) == MAX_WARNINGS
    with pytest.raises(ServiceError) as caught:
        reported({**CONTENTS, "temprature": 1}, is_strict=True)
    assert (caught.value.info.field, caught.value.info.given) == ("temprature", 1)
    assert caught.value.info.message == (
        "temprature: is not a field of this request; the nearest known name is temperature; "
        "correct or remove it (--strict-fields)"
    )
    assert len(reported(TALK | {"user": "u1"}, ChatBody, is_strict=True)) == 1, "known fields stay warnings"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        (r"\n\r\t\0\\", "\n\r\t\0\\"),
        (r"\x41\u00e9\ud83d\ude00", "Aé😀"),
        (r"\q\x4", r"\q\x4"),
        (r"\\n", r"\n"),
    ],
)
def test_escapes_are_replaced(text: str, expected: str) -> None:
    assert unescaped("suffix", text) == expected


def test_an_escaped_lone_surrogate_is_refused() -> None:
    field, message = refusal(unescaped, "suffix", r"a\ud83d")
    assert (field, message) == ("suffix", "suffix: must be text with a UTF-8 form, but has a lone surrogate")


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
