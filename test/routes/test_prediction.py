"""`prediction` and `speculation`: OpenAI's forms, limits, and the usage of predicted tokens."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from routes.openai.chat import ChatFormatter
from routes.openai.request import ChatBody, CompletionBody
from routes.request.speculation import MAX_PREDICTION
from rwkv_batch.request import Finish, FinishReason

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


def test_usage_reports_predicted_tokens_apart() -> None:
    body = ChatBody.model_validate({**CHAT, "prediction": "x"})
    formatter = ChatFormatter(body, "fp_x", 1, len)
    drafts = {"accepted_drafts": {"prediction": 3, "ngram": 9}, "rejected_drafts": {"prediction": 2}}
    end = Finish(reason=FinishReason.STOP, prompt_tokens=4, completion_tokens=5, **drafts)
    counts = formatter.counts([end, None])
    assert counts["completion_tokens"] == 5
    assert counts["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 2,
    }
