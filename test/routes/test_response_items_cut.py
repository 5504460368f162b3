"""Which item of a response is incomplete when the tokens end."""

from __future__ import annotations

import msgspec
import pytest

from routes.openai.responses import ResponsesFormatter
from routes.openai.responses_body import ResponsesBody
from routes.response.generate import RowResult
from rwkv_batch.request import Finish, FinishReason


@pytest.mark.parametrize(
    ("answer_text", "items"),
    [
        ("<think>So it is", [("reasoning", "incomplete")]),
        ("<think>So it is.</think>", [("reasoning", "completed")]),
        ("<think>So it is.</think>\n\n", [("reasoning", "completed")]),
        ("<think>So it is.</think>\n\nYe", [("reasoning", "completed"), ("message", "incomplete")]),
    ],
)
def test_complete_reasoning_is_not_incomplete(answer_text: str, items: list[tuple[str, str]]) -> None:
    body = ResponsesBody.model_validate({"model": "m", "input": "Is it so?"})
    end = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1)
    answer = ResponsesFormatter(body, len).full_body([RowResult(text=answer_text, finish=end, logprobs=[])])
    statuses = msgspec.to_builtins(answer)
    assert statuses["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in statuses["output"]] == items
