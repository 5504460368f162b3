"""Every OpenAI route fails as OpenAI's own package expects.

This holds with and without a stream, at both base URLs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from test.routes.conftest import openai_client
from test.serving import Service

Send = Callable[..., Any]
ROUTES: dict[str, Callable[[OpenAI], Send]] = {
    "chat": lambda client: (
        lambda **fields: client.chat.completions.create(
            **{"model": "rwkv7", "messages": [{"role": "user", "content": "a"}], **fields}
        )
    ),
    "completions": lambda client: (
        lambda **fields: client.completions.create(**{"model": "rwkv7", "prompt": "a", **fields})
    ),
    "responses": lambda client: lambda **fields: client.responses.create(**{"model": "rwkv7", "input": "a", **fields}),
}
MISTAKES: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = [
    ({"temperature": -1}, openai.BadRequestError, "invalid_field", "temperature"),
    ({"top_p": "high"}, openai.BadRequestError, "invalid_field", "top_p"),
    ({"extra_body": {"stop_tokens": [70_000]}}, openai.BadRequestError, "invalid_field", "stop_tokens[0]"),
    ({"extra_body": {"timeout_s": 10**9}}, openai.BadRequestError, "invalid_field", "timeout_s"),
    ({"extra_body": {"regex": "("}}, openai.BadRequestError, "invalid_field", "regex"),
    ({"model": "rwkv7:nobody"}, openai.NotFoundError, "state_not_found", "state"),
    ({"model": "rwkv7+nothing"}, openai.NotFoundError, "adapter_not_found", "adapter"),
    ({"extra_body": {"session_id": ""}}, openai.BadRequestError, "invalid_field", "session_id"),
]


@pytest.fixture(scope="module", params=["/openai/v1", "/v1"])
def client(request: pytest.FixtureRequest, service: Service) -> Iterator[OpenAI]:
    with openai_client(service, request.param) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "error", "code", "param"), MISTAKES, ids=[case[3] for case in MISTAKES])
def test_a_mistake_has_its_exception_code_and_field(
    client: OpenAI,
    route: str,
    stream: bool,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str,
    param: str,
) -> None:
    with pytest.raises(error) as refused:
        ROUTES[route](client)(stream=stream, **fields)
    raised = refused.value
    assert (raised.code, raised.param) == (code, param)
    assert raised.type in ("invalid_request_error", "not_found_error")
    assert param in raised.message and raised.request_id in str(raised.body)
