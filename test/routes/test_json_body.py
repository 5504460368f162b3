"""Parsing and validating a body: exact limits, and errors that name the field with its value."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import ANY

import pytest

from routes.engines import AddBody
from routes.fine_tuning.jobs import HyperparametersFields
from routes.models import LoadBody
from routes.openai.files import FilesQuery, not_found
from routes.openai.request import ChatBody
from routes.openai.responses_body import ResponsesBody
from routes.request import json_body
from routes.request.bodies import PromptBody
from routes.request.fields import describe_value, error_field_name, error_value
from routes.request.form_body import MAX_FORM_FIELDS, parse_form
from routes.request.json_body import parse_json, validate
from routes.state import BranchBody, DeleteBody, ExportQuery, ImportQuery, TurnBody
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError


def error_of(call: Any, *arguments: Any) -> ErrorInfo:
    with pytest.raises(ServiceError) as caught:
        call(*arguments)
    return caught.value.info


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "OTHER_VALUES", 6)
    monkeypatch.setattr(json_body, "MAX_NAMES", 4)


MARKS = '"[,{:\\"[,:"'
"""A text with marks that count outside of texts only."""


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
VALUES, NAMES = "10 values in lists and objects", "4 lists, objects and names in them"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (lambda extra: json.dumps([1] * (11 + extra)), VALUES),
        (lambda extra: f"[{MARKS}{',1' * (10 + extra)}]", VALUES),
        (lambda extra: f"[{'1,' * (10 + extra)}{MARKS}]", VALUES),
        (lambda extra: "[" * (4 + extra), NAMES),
        (lambda extra: json.dumps({str(number): "a" for number in range(3 + extra)}), NAMES),
        (lambda extra: f"[{MARKS},{'[' * (3 + extra)}", NAMES),
        (lambda extra: f"{'[' * (4 + extra)}{MARKS}", NAMES),
        (lambda extra: f"[{MARKS * (14 + extra)}", "14 texts"),
    ],
)
def test_a_body_may_have_exactly_the_limits(small_limits: None, body: Any, what: str) -> None:
    """The limits are 4 token ids and 6 other values. Lists, objects and names share a limit of 4."""
    json_body.check_num_values(body(0).encode(), 4)
    info = error_of(json_body.check_num_values, body(1).encode(), 4)
    assert info.kind is ErrorKind.BODY_TOO_LARGE
    assert info.message == f"the body has more than {what}; send it in several requests"


def test_a_text_is_not_searched_for_values() -> None:
    """The first character shows the error, so nothing is counted.

    Counting marks outside of quotes takes a second for 8 MB.
    """
    info = error_of(parse_json, b'Chapter 1. "A, b": c, ' * 100_000, 9)
    assert info.kind is ErrorKind.NOT_JSON and "column 1" in info.message


def test_a_body_is_json_with_or_without_a_byte_order_mark() -> None:
    assert parse_json(b'\xef\xbb\xbf {"a": [NaN]}', 9) is not None
    empty = error_of(parse_json, b" \n", 9)
    assert (empty.kind, empty.message) == (ErrorKind.NOT_JSON, "the body is empty; send a JSON object, {} at least")
    torn = error_of(parse_json, b'{"a": ', 9)
    assert torn.kind is ErrorKind.NOT_JSON and torn.message.startswith("the body is not JSON: EOF while parsing")
    assert error_of(parse_json, b'{"a": \\ud800', 9).kind is ErrorKind.NOT_JSON


@pytest.mark.parametrize(
    ("body", "field", "given"),
    [
        (rb'{"a": "ok", "b": ["\ud800"]}', "b", '["\\ud800"]'),
        (rb'{"\ud800": 1}', "\\ud800", 1),
        (rb'{"model": "\ud83d\ude00", "session_id": "a\ud800"}', "session_id", "a\\ud800"),
        (rb'{"": "\ud800"}', '""', "\\ud800"),
        (rb'["\ud800"]', "body", '["\\ud800"]'),
    ],
)
def test_a_lone_surrogate_is_an_error_of_its_field(body: bytes, field: str, given: Any) -> None:
    info = error_of(parse_json, body, 9)
    assert (info.kind, info.field, info.given) == (ErrorKind.INVALID_FIELD, field, given)
    assert info.message.startswith(f"{field}: must be text with a UTF-8 form, but has a lone surrogate (")


def test_a_form_has_at_most_so_many_fields() -> None:
    fields = b"&".join([b"a=1"] * MAX_FORM_FIELDS)
    assert parse_form(fields, ()) == {"a": "1"}
    assert error_of(parse_form, fields + b"&b=1", ()).kind is ErrorKind.NOT_JSON


def test_errors_repeat_at_most_200_characters() -> None:
    assert [error_value(value) for value in (None, True, 2**53 - 1, 0.5, "a" * 200)] == [
        None,
        True,
        2**53 - 1,
        0.5,
        "a" * 200,
    ]
    assert error_value("a" * 201) == "a" * 200 + "... (201 characters)"
    assert error_value(2**53) == str(2**53) and error_value(float("inf")) == "inf"
    assert error_value(["é", True, None]) == '["é", true, null]'
    assert len(error_value([["a" * 300]] * 9)) == 200
    assert [describe_value(value) for value in ("", None, True, 3, "x")] == ["an empty text", "null", "true", "3", "x"]
    texts = ("true", "-1.5e3", '["a"]', "3 x")
    assert [describe_value(text) for text in texts] == ['"true"', '"-1.5e3"', '"[\\"a\\"]"', "3 x"]
    assert error_field_name("a" * 64) == "a" * 64 and error_field_name("a" * 65) == "a" * 64 + "..."
    assert error_field_name("") == '""' and error_field_name("\ud800") == "\\ud800"


@pytest.mark.parametrize("kind", ["file", "batch", "job", "document"])
def test_an_unknown_object_is_named_with_what_to_do(kind: str) -> None:
    info = not_found(kind, "x").info
    assert info.message.startswith(f"{kind}_id: no such {kind}: 'x'; ") and (info.field, info.given) == (
        f"{kind}_id",
        "x",
    )


@pytest.mark.parametrize(
    ("model", "body", "field", "message", "given"),
    [
        (PromptBody, [], "body", "the body must be a JSON object, got []", None),
        (FilesQuery, {"limit": "abc"}, "limit", "limit: must be a valid integer, got abc", "abc"),
        (PromptBody, None, "body", "the body must be a JSON object, got null", None),
        (PromptBody, {"contents": ["a"], "top_k": -2}, "top_k",
         "top_k: must be greater than or equal to -1, got -2", -2),
        (PromptBody, {"contents": ["a", 7]}, "contents[1]", "contents[1]: must be a valid string, got 7", 7),
        (PromptBody, {"contents": ["a"], "stop_tokens": [0, -1]}, "stop_tokens[1]",
         "stop_tokens[1]: must be greater than or equal to 0, got -1", -1),
        (PromptBody, {"messages": [{"role": "user"}, {}]}, "messages[1].role", "messages[1].role: must be given", None),
        (PromptBody, {"messages": [3]}, "messages[0]", "messages[0]: must be a JSON object, got 3", 3),
        (ChatBody, {**TALK, "stream_options": True}, "stream_options",
         "stream_options: must be a JSON object, got true", True),
        (PromptBody, {"contents": ["a"], "states": [{"weight": 1001}]}, "states[0].weight",
         "states[0].weight: must be less than or equal to 1000, got 1001", 1001),
        (PromptBody, {}, "contents",
         "exactly one of contents, messages and prefix/suffix must be given and not be empty", None),
        (PromptBody, {"prefix": ["a"], "suffix": ["a", "b"]}, "prefix",
         "prefix and suffix must be of equal length, got 1 and 2", '["a"]'),
        (PromptBody, {"contents": ["a"], "regex": "a", "choice": ["b"]}, "choice",
         "regex and choice exclude each other", '["b"]'),
        (PromptBody, {"contents": ["a"], "session_id": ""}, "session_id",
         "session_id: must have at least 1 character, got an empty text", ""),
        (HyperparametersFields, {"n_epochs": 0}, "n_epochs", "n_epochs: must be greater than or equal to 1, got 0", 0),
        (HyperparametersFields, {"n_epochs": "x"}, "n_epochs",
         "n_epochs: must be 'auto' or a whole number, got x", "x"),
        (HyperparametersFields, {"learning_rate_multiplier": "nan"}, "learning_rate_multiplier",
         "learning_rate_multiplier: must be 'auto' or a number, got nan", "nan"),
        (LoadBody, {"file": "a", "dtype": "fp7"}, "dtype",
         "dtype: must be one of auto, fp32, bf16, fp16, fp8, int8, int4, got fp7", "fp7"),
        (LoadBody, {"file": "a", "wkv_state": "fp8"}, "wkv_state",
         "wkv_state: must be one of auto, fp32, fp16, int8, got fp8", "fp8"),
        (LoadBody, {"file": "a", "kernels": "CUDA"}, "kernels",
         "kernels: must be one of auto, cuda, cpu, naive, got CUDA", "CUDA"),
        (LoadBody, {"file": "a", "devices": ["0", "gpu"]}, "devices[1]",
         "devices[1]: must be a device like cuda:0, a GPU's number, …", "gpu"),
        (AddBody, {"devices": ["cuda:0\n"]}, "devices[0]",
         "devices[0]: must be a device like cuda:0, a GPU's number, …", "cuda:0\n"),
        (PromptBody, {**TALK, "template": {"user": "a:b"}}, "template.user",
         "template.user: must be a label of one line without…", "a:b"),
        (ChatBody, {**TALK, "presence_penalty": 100.1}, "presence_penalty",
         "presence_penalty: must be less than or equal to 100, got 100.1", 100.1),
        (ChatBody, {**TALK, "frequency_penalty": -100.1}, "frequency_penalty",
         "frequency_penalty: must be greater than or equal to -100, got -100.1", -100.1),
        (PromptBody, {"contents": ["a"], "stop_tokens": ["x"] * 65}, "stop_tokens",
         "stop_tokens: must have at most 64 items…", ANY),
        (PromptBody, {"contents": ["a"], **TALK}, "contents",
         "exactly one of contents, messages and prefix/suffix…", '["a"]'),
        (ChatBody, {**TALK, "logit_bias": {"1": "a"}}, "logit_bias.1",
         "logit_bias.1: must be a valid number, got a", "a"),
        (ChatBody, {**TALK, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name",
         "tools[0].function.name: must be 1 to 128 letters, digits, '_', '.' and '-', got a b", "a b"),
        (PromptBody, {"contents": ["a"], "mrss_gatingweight": ["abc"]}, "mrss_gatingweight[0]",
         "mrss_gatingweight[0]: must be a valid number, got abc", "abc"),
        (PromptBody, {"contents": ["a"], "mrss_gatingweight": [1] * 17}, "mrss_gatingweight",
         "mrss_gatingweight: must have at most 16 items, got [1…", ANY),
        (PromptBody, {"contents": ["a"], "stop_tokens": [""]}, "stop_tokens[0]",
         "stop_tokens[0]: must have at least 1 character, got an empty text", ""),
        (PromptBody, {"contents": ["a"], "temperature": {"a": [True, None, "b"]}}, "temperature",
         'temperature: must be a valid number, got {"a": [true, null, "b"]}', '{"a": [true, null, "b"]}'),
        (PromptBody, {"contents": ["a"], "session_id": True}, "session_id",
         "session_id: must be a valid string, got true", True),
        (PromptBody, {"contents": ["a"], "session_id": "x" * 257}, "session_id",
         "session_id: must have at most 256 characters…", ANY),
        (ChatBody, {"messages": [{"role": "user"}], "logit_bias": {"x": "y"}}, "logit_bias.x", "…", "y"),
        (ChatBody, {**TALK, "logit_bias": {"": 1}}, 'logit_bias.""', "…", ""),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type",
         "…", "image"),
    ],
)  # fmt: skip
def test_an_invalid_field_is_named_with_its_limit_and_value(
    model: Any, body: Any, field: str, message: str, given: Any
) -> None:
    info = error_of(validate, model, body)
    assert (info.kind, info.field, info.given) == (ErrorKind.INVALID_FIELD, field, given)
    assert info.message == message or (message.endswith("…") and info.message.startswith(message[:-1]))
    assert "pattern" not in info.message


def test_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    body = validate(PromptBody, {"contents": ["a"], "top_k": None, "seed": None, "unknown": 1})
    assert (body.top_k, body.seed) == (50, None) and "top_k" not in body.model_fields_set
    edge = validate(PromptBody, {"contents": ["a"], "seed": 2**64 - 1, "stop_tokens": ["x"] * 64})
    assert (edge.seed, edge.wait) == (2**64 - 1, True)


def test_an_empty_name_is_the_default() -> None:
    assert validate(LoadBody, {"file": "a.pth", "dtype": "", "kernels": None, "devices": ["0", "cuda:1", "cpu"]})


def test_documents_list_the_names() -> None:
    fields = LoadBody.model_json_schema()["properties"]
    assert fields["kernels"]["enum"] == ["", "auto", "cuda", "cpu", "naive"]
    assert "cuda" in fields["devices"]["items"]["pattern"]


@pytest.mark.parametrize("model", [PromptBody, TurnBody, BranchBody, ChatBody, ResponsesBody, DeleteBody])
def test_names_with_nul_are_refused_everywhere(model: Any) -> None:
    others = TALK if model is ChatBody else {"contents": ["a"], "input": "a", "dialogue_idx": 0}
    assert validate(model, {**others, "session_id": "a\tb"}).session_id == "a\tb"
    for name in ("\0", "a\0b"):
        with pytest.raises(ServiceError, match=r"session_id: must be a name without the character U\+0000") as caught:
            validate(model, {**others, "session_id": name})
        assert (caught.value.info.field, caught.value.info.given) == ("session_id", name)


@pytest.mark.parametrize("query", [ExportQuery, ImportQuery])
def test_exports_refuse_names_with_nul(query: Any) -> None:
    with pytest.raises(ServiceError, match=r"session_id: must be a name without the character U\+0000"):
        validate(query, {"session_id": "a\0"})
