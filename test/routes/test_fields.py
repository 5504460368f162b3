"""Fields of all bodies: fixed names, refused values, constraints, escapes."""

from __future__ import annotations

from typing import Any

import pytest

from routes.request.bodies import MixedState, PromptBody, with_mixture_weights
from routes.request.fields import THINK_END, unescaped
from routes.request.json_body import validate
from rwkv_batch.errors import ErrorKind, ServiceError
from sampling.grammar.constraint import Constraint, Form

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
    assert refusal(validate, PromptBody, {**CONTENTS, field: refused})[0] == field
    for value in allowed:
        validate(PromptBody, {**CONTENTS, field: value})


def test_numbers_may_be_texts_where_a_route_allows_it() -> None:
    weights = validate(PromptBody, {**CONTENTS, "mrss_gatingweight": ["1", 2, "-1e3"]}).mrss_gatingweight
    assert weights == [1.0, 2.0, -1000.0]
    for wrong in ("one", "1" * 33, "1001", "nan"):
        field, message = refusal(validate, PromptBody, {**CONTENTS, "mrss_gatingweight": [wrong]})
        assert field == "mrss_gatingweight[0]" and message.endswith(f"got {wrong}")
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
