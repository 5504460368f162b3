"""The OpenAI routes with OpenAI's own package.

Against a running service:

    python test/routes/test_openai_routes.py [--url http://localhost:8000] [--password P]

Under pytest, a service is started.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

URL, PASSWORD = "RWKV_TEST_URL", "RWKV_TEST_PASSWORD"
ROOT = Path(__file__).resolve().parents[2]
MODEL = "rwkv7"
ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a river?"}]
EXACT: dict[str, Any] = {"ignore_eos": True, "stop_tokens": []}
"""Answers of exactly `max_tokens` tokens."""
FREE: dict[str, Any] = {**EXACT, "alpha_presence": 0, "alpha_frequency": 0, "top_k": 0}


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest) -> str:
    url = os.environ.get(URL) or request.getfixturevalue("service").url
    return f"{url}/openai/v1"


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base, api_key=os.environ.get(PASSWORD) or "none", max_retries=0, timeout=120) as made:
        yield made


def chat(client: OpenAI, **fields: Any) -> Any:
    extra = {**EXACT, **fields.pop("extra_body", {})}
    return client.chat.completions.create(
        **{"model": MODEL, "messages": ASK, "max_tokens": 12, **fields}, extra_body=extra
    )


@pytest.fixture(scope="module")
def native(base: str) -> Iterator[OpenAI]:
    """The same client for the native route of conversations."""
    url = base.replace("/openai/v1", "/v1")
    with OpenAI(base_url=url, api_key=os.environ.get(PASSWORD) or "none", max_retries=0, timeout=120) as made:
        yield made


def test_the_native_route_accepts_openais_conversations(client: OpenAI, native: OpenAI) -> None:
    fields: dict[str, Any] = {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0, "max_tokens": 40}
    answer_there = chat(client, **fields)
    same = chat(native, **fields)
    assert same.choices[0].message.content == answer_there.choices[0].message.content
    assert chat(native, **{**fields, "max_completion_tokens": 5}).usage.completion_tokens == 5
    text = answer_there.choices[0].message.content
    cut = text[4:6]
    for stop in (cut, ["no such text", cut]):
        short = chat(native, **fields, stop=stop).choices[0]
        assert (short.message.content, short.finish_reason) == (text[: text.index(cut)], "stop")


def test_a_native_stream_has_openais_end_and_usage(native: OpenAI) -> None:
    chunks = list(chat(native, stream=True, stream_options={"include_usage": True}))
    *said, last = chunks
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in said)
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * (len(said) - 1) + ["length"]
    assert not last.choices and last.usage.completion_tokens == 12
    assert last.usage == chat(native).usage
    assert len({chunk.id for chunk in chunks}) == 1


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"place": {"type": "string", "maxLength": 5}}}},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"5": 1}},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
    ],
)
def test_the_native_route_serves_these_fields_with_conversations(
    client: OpenAI, native: OpenAI, fields: dict[str, Any]
) -> None:
    """VS Code's Copilot posts its tools there."""
    fields = {**fields, "seed": 3}
    one, other = chat(client, **fields), chat(native, **fields)
    assert [choice.finish_reason for choice in one.choices] == [choice.finish_reason for choice in other.choices]
    for here, there in zip(one.choices, other.choices, strict=True):
        assert (here.message.content, here.logprobs) == (there.message.content, there.logprobs)
        calls = [[call.function for call in choice.message.tool_calls or ()] for choice in (here, there)]
        assert calls[0] == calls[1] and len(calls[0]) == (fields.get("tool_choice") == "required")
    chunks = list(chat(native, **fields, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == set(range(fields.get("n", 1)))


def test_the_native_route_has_openais_errors_for_conversations_only(native: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature: must") as refused:
        chat(native, temperature=-1)
    assert (refused.value.code, refused.value.param) == ("invalid_field", "temperature")
    with pytest.raises(BadRequestError) as refused:
        native.post("/chat/completions", cast_to=object, content=b'{"messages" :[')
    assert refused.value.code == "not_json"
    with pytest.raises(openai.APIStatusError) as native_refusal:
        native.post("/chat/completions", cast_to=object, body={"contents": ['"messages":'], "temperature": -1})
    answer = native_refusal.value.response.json()
    assert native_refusal.value.status_code == 422
    assert answer["error"].startswith("temperature: must") and answer["field"] == "temperature"
    with pytest.raises(openai.NotFoundError, match="it is /openai/v1/embeddings here") as unknown:
        native.embeddings.create(model=MODEL, input="a")
    assert unknown.value.code == "not_found"


@pytest.mark.parametrize("prefix", ["/openai/v1", "/v1"])
def test_one_model(base: str, prefix: str) -> None:
    url = base.removesuffix("/openai/v1") + prefix
    with OpenAI(base_url=url, api_key=os.environ.get(PASSWORD) or "none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert model.object == "model" and isinstance(model.created, int) and model.owned_by
        assert client.models.retrieve(model.id) == model
        for unknown in ("gpt-4", "a/b", "ein Modell ✿", "x" * 2000):
            with pytest.raises(openai.NotFoundError) as refused:
                client.models.retrieve(unknown)
            error = refused.value
            assert (error.code, error.param, error.type) == ("model_not_found", "model", "not_found_error")
            assert unknown[:100] in error.message and model.id in error.message


def test_any_model_name_is_accepted(client: OpenAI) -> None:
    """Clients have built-in names. With --models-dir an unknown name is 404 (test_model_engines.py)."""
    for name in ("gpt-4o", "meta-llama/Llama-3-8B"):
        assert chat(client, model=name, max_tokens=1).model == name


def test_a_whole_answer(client: OpenAI) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.system_fingerprint.startswith("fp_")
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.message.content == choice.message.content.lstrip()
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = chat(client, seed=5, n=2, max_tokens=20)
    chunks = list(chat(client, seed=5, n=2, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    texts, ends = {0: "", 1: ""}, {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert [chunks[n].choices[0].delta.role for n in (0, 1)] == ["assistant", "assistant"]
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {0: "length", 1: "length"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_only_on_request(client: OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.slow
def test_log_probabilities_without_a_stream_are_limited(client: OpenAI) -> None:
    large_fields: dict[str, Any] = {"n": 128, "max_tokens": 8192, "logprobs": True, "top_logprobs": 5}
    with pytest.raises(BadRequestError) as refusal:
        chat(client, **large_fields)
    assert refusal.value.param == "logprobs" and "the limit is 2000000" in refusal.value.message
    assert "set stream" in refusal.value.message
    with chat(client, **large_fields, stream=True) as stream:
        assert next(iter(stream)).choices
    parallel_calls = chat(client, n=2, seed=1, max_tokens=600, logprobs=True, top_logprobs=1, extra_body=FREE)
    for choice in parallel_calls.choices:
        answer_there = choice.logprobs.content
        shown = b"".join(bytes(entry.bytes) for entry in answer_there).decode(errors="replace")
        assert len(answer_there) > 256 and shown.strip() == choice.message.content.strip()


@pytest.mark.parametrize("seed", [{"seed": 70}, {}], ids=["given", "random"])
def test_equal_prompts_with_n_answers_share_no_seed(client: OpenAI, seed: dict[str, Any]) -> None:
    large_fields = {"model": MODEL, "max_tokens": 24, "temperature": 2.0, "extra_body": FREE, **seed}
    choices = client.completions.create(prompt=["The"] * 4, n=4, **large_fields).choices
    assert len({choice.text for choice in choices}) == 16
    if seed:
        last = client.completions.create(prompt="The", **{**large_fields, "seed": 70 + 3 * 4 + 1}).choices[0]
        assert choices[3 * 4 + 1].text == last.text


def test_n_answers_are_those_of_n_seeds_for_one_prefill(client: OpenAI) -> None:
    parallel_calls = chat(client, n=3, seed=100, temperature=1.5, extra_body=FREE)
    single = [chat(client, seed=100 + i, temperature=1.5, extra_body=FREE) for i in range(3)]
    texts = [choice.message.content for choice in parallel_calls.choices]
    assert texts == [answer.choices[0].message.content for answer in single]
    assert parallel_calls.usage.prompt_tokens == single[0].usage.prompt_tokens
    assert parallel_calls.usage.completion_tokens == 36


def test_log_probabilities_are_of_the_distribution_before_truncation(client: OpenAI) -> None:
    narrow = chat(client, seed=1, logprobs=True, top_logprobs=5, extra_body={**FREE, "top_k": 1}).choices[0]
    greedy = chat(client, temperature=0, logprobs=True, top_logprobs=5, extra_body=FREE).choices[0]
    assert narrow.message.content == greedy.message.content
    entries = narrow.logprobs.content
    assert len(entries) == 12
    for entry, same in zip(entries, greedy.logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
        assert entry.logprob == entry.top_logprobs[0].logprob
        values = [rival.logprob for rival in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4
    text = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert text.strip().startswith(narrow.message.content.strip()[:5])


def test_streamed_log_probabilities_are_the_same(client: OpenAI) -> None:
    whole = chat(client, seed=9, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in chat(client, seed=9, logprobs=True, top_logprobs=2, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, {"enable_think": True}])
def test_log_probabilities_are_of_the_content(client: OpenAI, extra: dict[str, Any], stream: bool) -> None:
    """Also where a stop cuts a token or tokens are a thought."""

    def answered(**fields: Any) -> tuple[str, list[str]]:
        fields = {"seed": 5, "logprobs": True, "max_tokens": 32, "stream": stream, "extra_body": extra, **fields}
        answer = chat(client, **fields)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        texts = [(choice.delta if stream else choice.message).content or "" for choice in choices]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        content = "".join(texts)
        assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == content
        return content, [entry.token for entry in entries]

    content, tokens = answered()
    assert bool(content) != bool(extra), "the random model does not end its thought"
    for token in dict.fromkeys(token for token in tokens if token.isascii() and len(token) > 1):
        shorter, shown = answered(stop=token[1:])
        assert shorter == content[: content.index(token[1:])] and len(shown) <= len(tokens)


def test_reasoning_is_separate(client: OpenAI) -> None:
    for extra in ({"enable_think": True}, {"reasoning_effort": "high"}):
        fields = {"seed": 2, "max_tokens": 24, "extra_body": extra}
        message = chat(client, **fields).choices[0].message
        assert "<think" not in (message.content or "")
        assert message.reasoning_content
        deltas = [chunk.choices[0].delta for chunk in chat(client, **fields, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
        assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert not hasattr(chat(client, extra_body={"enable_think": False}).choices[0].message, "reasoning_content")


def test_a_session_computes_only_new_messages(client: OpenAI) -> None:
    session = f"openai-{uuid.uuid4().hex}"
    first = chat(client, extra_body={"session_id": session})
    answer_there = [*ASK, {"role": "assistant", "content": first.choices[0].message.content}]
    second = chat(
        client, messages=[*answer_there, {"role": "user", "content": "Why?"}], extra_body={"session_id": session}
    )
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == first.usage.total_tokens
    alone = chat(client, messages=[{"role": "user", "content": "Why?"}])
    assert second.usage.prompt_tokens - details.cached_tokens == alone.usage.prompt_tokens + 1


def test_raw_prompts_in_every_form(client: OpenAI) -> None:
    create = client.completions.create
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 4, "extra_body": EXACT}
    one = create(prompt="Once upon", **fields)
    assert one.id.startswith("cmpl-")
    assert (one.object, one.choices[0].finish_reason, one.usage.completion_tokens) == ("text_completion", "length", 6)
    two = create(prompt=["Once upon", "The"], **fields)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    ids = create(prompt=[[33, 59], [33, 59]], n=2, **fields)
    assert len(ids.choices) == 4
    assert ids.usage.prompt_tokens == 4
    assert create(prompt=[33, 59], **fields).choices[0].text == ids.choices[0].text
    echoed = create(prompt="Once upon", echo=True, **fields)
    assert echoed.choices[0].text == "Once upon" + one.choices[0].text
    streamed = list(create(prompt="Once upon", echo=True, stream=True, **fields))
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == echoed.choices[0].text
    filled = create(prompt="def f(", suffix="): pass", **fields)
    assert filled.choices[0].finish_reason in ("length", "stop")


def test_sixteen_tokens_are_the_default_of_raw_prompts(client: OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="a", extra_body=EXACT).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 2, "extra_body": {"session_id": "s"}}, "session_id"), ({"max_tokens": 10**9}, "max_tokens")],
)
def test_a_bad_field_is_a_bad_request(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        chat(client, **fields)
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.body["message"] in str(refusal.value)


def test_embeddings_are_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="embeddings are not supported") as refusal:
        client.embeddings.create(model=MODEL, input="a")
    assert refusal.value.code == "not_found"


def test_a_negative_seed_is_a_seed(client: OpenAI) -> None:
    hot = {"temperature": 2, "extra_body": {**FREE, "top_p": 1}}  # so that any model gives two different answers
    answers = [chat(client, seed=seed, n=2, **hot).choices for seed in (-1, -1, 2**64 - 1)]
    texts = [[choice.message.content for choice in choices] for choices in answers]
    assert texts[0] == texts[1] == texts[2] and texts[0][0] != texts[0][1]
    assert texts[0][1] == chat(client, seed=0, **hot).choices[0].message.content
    with pytest.raises(BadRequestError) as refusal:
        chat(client, seed=-(2**63) - 1)
    assert refusal.value.param == "seed"


def test_a_developer_message_is_a_system_message(client: OpenAI) -> None:
    answers = [
        chat(client, seed=1, messages=[{"role": role, "content": "Be brief."}, ASK[1]], max_completion_tokens=7)
        for role in ("system", "developer")
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert [answer.usage.completion_tokens for answer in answers] == [7, 7]


@pytest.mark.parametrize("started", ["A river is", "A river is ", "  one\r\n\r\ntwo\n"])
def test_the_assistants_last_message_is_continued(client: OpenAI, started: str) -> None:
    large_fields: dict[str, Any] = {"model": MODEL, "seed": 5, "max_tokens": 24, "extra_body": EXACT}
    messages = [*ASK, {"role": "assistant", "content": started}]
    clean = started.lstrip().replace("\r\n\r\n", "\n")
    raw = f"System: Be brief.\n\nUser: What is a river?\n\nAssistant: {clean}"
    expected = client.completions.create(prompt=raw, **large_fields).choices[0].text
    answer = chat(client, messages=messages, seed=5, max_tokens=24)
    assert answer.choices[0].message.content == expected
    thinking = chat(client, messages=messages, seed=5, max_tokens=24, reasoning_effort="high")
    assert thinking.choices[0].message.content == expected
    pieces = chat(client, messages=messages, seed=5, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected
    new = chat(client, messages=messages, seed=5, max_tokens=24, extra_body={"continue_final_message": False})
    assert new.usage.prompt_tokens > answer.usage.prompt_tokens


def test_invalid_continuations_are_refused(client: OpenAI) -> None:
    for messages, extra, param in (
        (ASK, {}, "messages"),
        ([*ASK, {"role": "assistant", "content": "A"}], {"session_id": "s"}, "continue_final_message"),
    ):
        with pytest.raises(BadRequestError) as refusal:
            chat(client, messages=messages, extra_body={"continue_final_message": True, **extra})
        assert refusal.value.param == param


def test_a_busy_session_is_a_conflict(client: OpenAI) -> None:
    session = f"busy-{uuid.uuid4().hex}"
    running = chat(client, max_tokens=100_000, stream=True, extra_body={"session_id": session})
    next(iter(running))
    try:
        with pytest.raises(openai.ConflictError) as refusal:
            chat(client, extra_body={"session_id": session, "wait": False})
        assert refusal.value.code == "session_busy"
    finally:
        running.close()


@pytest.mark.parametrize("name", ["client", "native"])
def test_a_session_deleted_under_its_stream_is_an_api_error(request: pytest.FixtureRequest, name: str) -> None:
    client: OpenAI = request.getfixturevalue(name)
    session = f"gone-{uuid.uuid4().hex}"
    running = chat(client, max_tokens=100_000, stream=True, extra_body={"session_id": session})
    chunks = iter(running)
    next(chunks)
    root = str(client.base_url).removesuffix("/v1/").removesuffix("/openai")
    answer = client.post(f"{root}/state/delete", cast_to=object, body={"session_id": session})
    assert answer["status"] == "success"  # type: ignore[index]
    with pytest.raises(openai.APIError, match="deleted"):
        for _ in chunks:
            pass


def test_a_timeout_returns_partial_text(client: OpenAI) -> None:
    for seconds in (0.5, 5.0, 50.0):  # a busy machine may generate nothing for a while
        choice = chat(client, max_tokens=1_000_000, extra_body={"timeout_s": seconds}).choices[0]
        assert choice.finish_reason == "length" and choice.to_dict()["end_reason"] == "timeout"
        if choice.message.content:
            break
    assert choice.message.content


def test_closing_a_stream_ends_its_rows(client: OpenAI) -> None:
    root = str(client.base_url).removesuffix("/openai/v1/")

    def running_rows() -> int:
        return client.get(f"{root}/status", cast_to=dict[str, Any])["running_rows"]

    before = running_rows()
    stream = chat(client, max_tokens=1_000_000, n=4, stream=True)
    for _ in itertools.islice(stream, 8):
        pass
    stream.close()
    deadline = time.monotonic() + 120
    while running_rows() > before:
        assert time.monotonic() < deadline, "the rows run on"
        time.sleep(0.05)


def test_fifty_at_once(client: OpenAI) -> None:
    alone = {seed: chat(client, seed=seed, temperature=1.5).choices[0].message.content for seed in (0, 1, 2)}

    async def one(remote: AsyncOpenAI, number: int) -> str:
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": ASK,
            "max_tokens": 12,
            "temperature": 1.5,
            "seed": number % 3,
        }
        if number % 2:
            answer = await remote.chat.completions.create(**fields, extra_body=EXACT)
            return answer.choices[0].message.content or ""
        stream = await remote.chat.completions.create(**fields, extra_body=EXACT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0, timeout=120) as remote:
            return await asyncio.gather(*(one(remote, number) for number in range(50)))

    assert asyncio.run(all_of_them()) == [alone[number % 3] for number in range(50)]


def main() -> int:
    """Run these tests against a running service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get("RWKV_URL", "http://localhost:8000"))
    parser.add_argument("--password", default=os.environ.get("RWKV_PASSWORD", "rwkv7_7.2b"))
    options, rest = parser.parse_known_args()
    os.environ |= {URL: options.url, PASSWORD: options.password}
    return pytest.main([__file__, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *rest])


if __name__ == "__main__":
    sys.exit(main())
