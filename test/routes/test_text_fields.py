"""Error messages for texts that are not an allowed name. Also for texts that do not match a pattern."""

from __future__ import annotations

from typing import Any

import pytest

from routes.engines import AddBody
from routes.models import LoadBody
from routes.openai.request import ChatBody
from routes.openai.responses_body import ResponsesBody
from routes.request.bodies import PromptBody
from routes.request.json_body import parse_json, validate
from routes.state import BranchBody, DeleteBody, ExportQuery, ImportQuery, TurnBody
from rwkv_batch.errors import ServiceError
from state_pool.session_file import InvalidSessionFile, decode

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("model", "body", "field", "expected"),
    [
        (LoadBody, {"dtype": "fp7"}, "dtype", "must be one of auto, fp32, bf16, fp16, fp8, int8, int4, w8a8, got fp7"),
        (LoadBody, {"wkv_state": "fp8"}, "wkv_state", "must be one of auto, fp32, fp16, int8, got fp8"),
        (LoadBody, {"kernels": "CUDA"}, "kernels", "must be one of auto, cuda, cpu, naive, got CUDA"),
        (LoadBody, {"devices": ["0", "gpu"]}, "devices[1]", "must be a device like cuda:0, a GPU's number, "),
        (AddBody, {"devices": ["cuda:0\n"]}, "devices[0]", "must be a device like cuda:0, a GPU's number, "),
        (PromptBody, MESSAGES | {"template": {"user": "a:b"}}, "template.user", "must be a label of one line without"),
        (
            ChatBody,
            MESSAGES | {"logit_bias": {"1": "a"}},
            "logit_bias.1",
            "must be a valid number, got a",
        ),
        (
            ChatBody,
            MESSAGES | {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "must be 1 to 128 letters, digits, '_', '.' and '-', got a b",
        ),
    ],
)
def test_pattern_errors_are_in_words(model: Any, body: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(ServiceError) as caught:
        validate(model, {"file": "a.pth", **body})
    assert caught.value.info.field == field
    assert str(caught.value).startswith(f"{field}: {expected}")
    assert "pattern" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"contents": ["a"], "mrss_gatingweight": ["abc"]}, "mrss_gatingweight[0]: must be a valid number, got abc"),
        ({"contents": ["a"], "mrss_gatingweight": [1] * 17}, "mrss_gatingweight: must have at most 16 items, got [1"),
        ({"contents": ["a"], "stop_tokens": [""]}, "stop_tokens[0]: must have at least 1 character, got an empty text"),
        (
            {"contents": ["a"], "temperature": {"a": [True, None, "b"]}},
            'temperature: must be a valid number, got {"a": [true, null, "b"]}',
        ),
        ({"contents": ["a"], "session_id": True}, "session_id: must be a valid string, got true"),
    ],
)
def test_other_fields_have_the_same_wording(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError) as caught:
        validate(PromptBody, body)
    assert str(caught.value).startswith(message)


def test_errors_show_text_without_utf8_form() -> None:
    with pytest.raises(ServiceError, match="session_id: must be text with a UTF-8 form") as caught:
        parse_json(b'{"contents": ["a"], "session_id": "a\\ud800"}', 9)
    assert (caught.value.info.field, caught.value.info.given) == ("session_id", "a\\ud800")


def test_an_empty_file_name_is_refused() -> None:
    with pytest.raises(InvalidSessionFile, match="this is not a session file: it has 3 bytes"):
        decode(b"abc")


def test_an_empty_name_is_the_default() -> None:
    assert validate(LoadBody, {"file": "a.pth", "dtype": "", "kernels": None, "devices": ["0", "cuda:1", "cpu"]})


def test_documents_list_the_names() -> None:
    fields = LoadBody.model_json_schema()["properties"]
    assert fields["kernels"]["enum"] == ["", "auto", "cuda", "cpu", "naive"]
    assert "cuda" in fields["devices"]["items"]["pattern"]


@pytest.mark.parametrize("model", [PromptBody, TurnBody, BranchBody, ChatBody, ResponsesBody, DeleteBody])
def test_names_with_nul_are_refused_everywhere(model: Any) -> None:
    others = MESSAGES if model is ChatBody else {"contents": ["a"], "input": "a", "dialogue_idx": 0}
    assert validate(model, {**others, "session_id": "a\tb"}).session_id == "a\tb"
    for name in ("\0", "a\0b"):
        with pytest.raises(ServiceError, match=r"session_id: must be a name without the character U\+0000") as caught:
            validate(model, {**others, "session_id": name})
        assert (caught.value.info.field, caught.value.info.given) == ("session_id", name)


@pytest.mark.parametrize("query", [ExportQuery, ImportQuery])
def test_exports_refuse_names_with_nul(query: Any) -> None:
    with pytest.raises(ServiceError, match=r"session_id: must be a name without the character U\+0000"):
        validate(query, {"session_id": "a\0"})


def test_length_limits_are_in_characters() -> None:
    with pytest.raises(ServiceError, match="session_id: must have at most 256 characters"):
        validate(PromptBody, {"contents": ["a"], "session_id": "x" * 257})
