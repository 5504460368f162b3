"""`prediction` and `speculation`: OpenAI's forms, limits, and the usage of predicted tokens. Limits of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.openai.chat import ChatFormatter
from routes.openai.completions import CompletionFormatter
from routes.openai.formatter import OpenAIFormatter, openai_rows
from routes.openai.request import ChatBody, CompletionBody
from routes.request.jobs import build_rows
from routes.request.json_body import validate
from routes.request.speculation import MAX_PREDICTION
from routes.request_context import RequestContext, set_current_request
from rwkv_batch.errors import ServiceError
from rwkv_batch.request import Finish, FinishReason, GenerateRequest
from rwkv_batch.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "given",
    [
        "a text",
        {"type": "content", "content": "a text"},
        {"type": "content", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]},
    ],
)
def test_a_prediction_has_openais_forms(given: Any) -> None:
    assert ChatBody.model_validate({**CHAT, "prediction": given}).predicted_text == "a text"
    assert CompletionBody.model_validate({"prompt": "x", "prediction": given}).predicted_text == "a text"


def test_what_is_no_prediction_is_refused() -> None:
    assert ChatBody.model_validate({**CHAT, "prediction": None}).predicted_text == ""
    wrong: list[dict[str, Any]] = [
        {"prediction": "x" * (MAX_PREDICTION + 1)},
        {"prediction": {"type": "content", "content": "x" * (MAX_PREDICTION + 1)}},
        {"prediction": {"type": "image", "content": "x"}},
        {"prediction": 5},
        {"speculation": "always"},
    ]
    for fields in wrong:
        with pytest.raises(ValidationError):
            ChatBody.model_validate({**CHAT, **fields})


def test_errors_of_a_prediction_say_what_is_allowed() -> None:
    """They said that a text is demanded, and parts had no limit in all: tokenising 12 MB blocked the worker."""
    with pytest.raises(ServiceError, match="prediction: must be a text, or an object with the text as content, got 5"):
        validate(ChatBody, {**CHAT, "prediction": 5})
    message = r'prediction\.content: must be a text, or a list of text parts, got {"a": 1}'
    with pytest.raises(ServiceError, match=message):
        validate(ChatBody, {**CHAT, "prediction": {"content": {"a": 1}}})
    parts = [{"type": "text", "text": "x" * (MAX_PREDICTION // 2 + 1)}] * 2
    with pytest.raises(ServiceError, match=r"prediction\.content: must have at most 200000 characters in all"):
        validate(ChatBody, {**CHAT, "prediction": {"content": parts}})


def test_predictions_of_many_prompts_count() -> None:
    """Each row has the prediction: 256 prompts made a message of 92 MB."""
    config = HttpConfig(max_request_tokens=32, speculate="auto")
    tokenizer = Tokenizer()

    def rows(count: int, **fields: Any) -> list[GenerateRequest]:
        body = CompletionBody.model_validate({"prompt": ["x"] * count, "prediction": "a b c d e f g h", **fields})
        return build_rows(tokenizer, config, body, ["x"] * count, [], "prompt")

    assert {len(row.prediction) for row in rows(4)} == {8}
    with pytest.raises(ServiceError, match="has 8 tokens for each of 5 prompts, the limit of all is 32"):
        rows(5)
    assert not any(row.prediction for row in rows(5, speculation="off"))


def formatters() -> list[OpenAIFormatter]:
    chat, completion = ChatBody.model_validate(CHAT), CompletionBody.model_validate({"prompt": "x"})
    return [ChatFormatter(chat, "fp_x", 1, len), CompletionFormatter(completion, "fp_x", 1)]


@pytest.mark.parametrize(("n", "field"), [(1, "prompt"), (3, "n")])
def test_too_many_prompts_blame_what_was_given(n: int, field: str) -> None:
    """An n of 1 was blamed."""
    context = Context(None, HttpConfig(max_contents=2), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
    body = CompletionBody.model_validate({"prompt": ["x"] * 3, "n": n})
    with pytest.raises(ServiceError) as refused:
        asyncio.run(openai_rows(context, body, ["x"] * 3, [], "prompt"))
    assert refused.value.info.field == field


@pytest.mark.parametrize("formatter", formatters())
def test_usage_reports_predicted_tokens_apart(formatter: OpenAIFormatter) -> None:
    drafts = {"accepted_drafts": {"prediction": 3, "ngram": 9}, "rejected_drafts": {"prediction": 2}}
    end = Finish(reason=FinishReason.STOP, prompt_tokens=4, completion_tokens=5, **drafts)
    counts = formatter.counts([end, None])
    assert counts["completion_tokens"] == 5
    assert counts["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 2,
    }
    off = formatter.counts([Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)])[
        "completion_tokens_details"
    ]
    assert off == dict.fromkeys(counts["completion_tokens_details"], 0)


@pytest.mark.parametrize(
    ("service", "request_mode", "reason"),
    [
        ("off", "auto", "the service runs without --speculate"),
        ("auto", "off", '`speculation` is "off"'),
        ("auto", "auto", ""),
    ],
)
def test_a_prediction_that_changes_nothing_is_a_warning(service: str, request_mode: str, reason: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x", "prediction": "a text", "speculation": request_mode})
    request = RequestContext()
    set_current_request(request)
    tokenizer, config = Tokenizer(), HttpConfig(speculate=service)
    (row,) = build_rows(tokenizer, config, body, ["x"], [], "prompt")
    message = f"prediction: was ignored, because {reason}"
    assert request.warnings == ([{"field": "prediction", "message": message}] if reason else [])
    assert row.prediction == ([] if reason else tokenizer.encode("a text"))
    request.warnings.clear()
    build_rows(tokenizer, config, CompletionBody(prompt="x", speculation=body.speculation), ["x"], [], "prompt")
    assert not request.warnings
