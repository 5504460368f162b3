"""Limits on the memory of small bodies: about ten times their size, and for errors too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from test.resource_limits import run_bounded
from test.serving import Service

pytestmark = pytest.mark.slow

MIB = 1 << 20
MOST_MIB = 160.0
"""Limit of memory for a body of 4 MiB, its parsed form and the error."""
COUNT = 2 * MIB
WRONG, LARGE, TORN = "invalid_field", "body_too_large", "not_json"
TALK = ',"messages":[{"role":"user"}]'
MESSAGE: dict[str, Any] = {"role": "user", "content": "a"}


Refusal = tuple[str, str | None, int]
"""Kind, field and length of an error."""


def refusal_of(work: Callable[[], object]) -> Refusal:
    from rwkv_batch.errors import ServiceError

    try:
        work()
    except ServiceError as error:
        return error.info.kind.value, error.info.field, len(json.dumps([error.info.message, error.info.given]))
    return "taken", None, 0


def refused(model: str, body: bytes) -> Refusal:
    from routes.llama_cpp.tokens import CountBody
    from routes.native_completions import BigBatchBody, FimBody
    from routes.openai.request import ChatBody, CompletionBody
    from routes.request.bodies import PromptBody
    from routes.request.json_body import parse_json, validate
    from routes.translation.batch_translate import TranslateBody

    models = (BigBatchBody, ChatBody, CompletionBody, CountBody, FimBody, PromptBody, TranslateBody)
    known = {one.__name__: one for one in models}
    return refusal_of(lambda: validate(known[model], parse_json(body, 1 << 20)))


def test_clients_texts_are_not_cached() -> None:
    """pydantic's string cache would keep them."""
    from routes.request.json_body import parse_json

    first, second = (parse_json(b'{"password": "secret"}', 9) for _ in range(2))
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["password"] is not second["password"]


def translated(text: str) -> Refusal:
    """Like `refused`, for a text to translate."""
    from routes.translation.translator import make_plan
    from rwkv_batch.translation.plan import TranslationCache, TranslationRequest

    request = TranslationRequest(texts=[text], source="en", target="eo")
    return refusal_of(lambda: make_plan(request, 4096, TranslationCache(4), "", "text_list"))


def counted(text: str) -> Refusal:
    """Like `refused`, for a prompt far above the token limit."""
    from routes.config import HttpConfig
    from routes.request.jobs import encode
    from rwkv_batch.tokenizer import Tokenizer

    return refusal_of(lambda: encode(Tokenizer(), text, "contents[0]", HttpConfig()))


def lists(inner: str, count: int = COUNT) -> bytes:
    return ("[" + ",".join([inner] * (count // (len(inner) + 1))) + "]").encode()


def names(count: int) -> bytes:
    return b"{" + b",".join(b'"x%d":1' % number for number in range(count)) + b"}"


def long_name() -> bytes:
    return b'{"' + b"x" * COUNT + b'":1}'


def one_message(content: bytes) -> bytes:
    return b'[{"role":"user","content":' + content + b"}]"


def field(name: str, value: bytes, rest: str = "") -> bytes:
    return b'{"' + name.encode() + b'":' + value + rest.encode() + b"}"


BODIES: list[tuple[str, str, Callable[[], bytes], str, str | None]] = [
    ("PromptBody", "ones", lambda: field("contents", lists("1")), WRONG, "contents[0]"),
    ("PromptBody", "text then ones", lambda: field("contents", b'["a",' + lists("1")[1:]), WRONG, "contents[1]"),
    ("PromptBody", "null contents", lambda: field("contents", lists("null")), WRONG, "contents[0]"),
    ("PromptBody", "stops", lambda: field("stop_tokens", lists("-1")), WRONG, "stop_tokens[0]"),
    ("PromptBody", "prefixes", lambda: field("prefix", lists("1"), ',"suffix":["a"]'), WRONG, "prefix[0]"),
    ("PromptBody", "messages", lambda: field("messages", lists("1")), WRONG, "messages[0]"),
    ("PromptBody", "empty messages", lambda: field("messages", lists("{}", 300_000)), WRONG, "messages[0].role"),
    ("PromptBody", "empty lists", lambda: field("contents", lists("[]", 2 * COUNT)), LARGE, None),
    ("PromptBody", "unknown lists", lambda: field("x", lists("[]", 2 * COUNT)), LARGE, None),
    ("PromptBody", "many names", lambda: names(400_000), LARGE, None),
    ("PromptBody", "many texts", lambda: field("x", lists('"ab"', 6 * COUNT)), LARGE, None),
    ("PromptBody", "a long model", lambda: field("model", b'"' + b"m" * COUNT + b'"'), WRONG, "model"),
    ("PromptBody", "a list as model", lambda: field("model", lists("1")), WRONG, "model"),
    ("PromptBody", "deep", lambda: b"[" * COUNT, LARGE, None),
    ("PromptBody", "deep enough", lambda: field("contents", b"[" * 1000 + b"]" * 1000), TORN, None),
    ("PromptBody", "quotes", lambda: field("x", b'""' * (2 * COUNT)), TORN, None),
    ("BigBatchBody", "ones", lambda: field("contents", lists("1")), WRONG, "contents[0]"),
    ("FimBody", "ones", lambda: field("suffix", lists("1"), ',"prefix":["a"]'), WRONG, "suffix[0]"),
    ("TranslateBody", "ones", lambda: field("text_list", lists("1"), ',"target_lang":"de"'), WRONG, "text_list[0]"),
    ("CountBody", "ones", lambda: field("contents", lists("1")), WRONG, "contents[0]"),
    ("ChatBody", "parts", lambda: field("messages", one_message(lists("1"))), WRONG, "messages[0].content[0]"),
    ("ChatBody", "stops", lambda: field("stop", lists("1"), TALK), WRONG, "stop[0]"),
    ("ChatBody", "biases", lambda: field("logit_bias", names(150_000), TALK), WRONG, "logit_bias"),
    ("ChatBody", "a long name", lambda: field("logit_bias", long_name(), TALK), WRONG, None),
    ("CompletionBody", "negative ids", lambda: field("prompt", lists("-1")), WRONG, "prompt[0]"),
    ("CompletionBody", "lists of them", lambda: field("prompt", lists("[-1]", 400_000)), WRONG, "prompt[0][0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "name", "body", "kind", "named"), BODIES, ids=[f"{one[0]}-{one[1]}" for one in BODIES]
)
def test_an_invalid_body_needs_little_memory(
    model: str, name: str, body: Callable[[], bytes], kind: str, named: str | None
) -> None:
    cost = run_bounded(refused, model, body())
    assert cost.result is not None, f"ended by a limit: exit code {cost.exit_code}"
    assert cost.result[0] == kind
    assert named is None or cost.result[1] == named
    assert cost.result[2] < 2000
    assert cost.peak_mib < MOST_MIB


@pytest.mark.parametrize("text", ["a\n\n" * 900_000, "a\n\n" * 5000, "b\n \n" * 500_000], ids=len)
def test_paragraphs_are_counted_before_they_are_split(text: str) -> None:
    cost = run_bounded(translated, text)
    assert cost.result is not None and cost.result[:2] == ("invalid_field", "text_list")
    assert cost.peak_mib < 30


def test_long_prompts_are_estimated_before_they_are_encoded() -> None:
    vocabulary = run_bounded(counted, "a")
    assert vocabulary.result == ("taken", None, 0)
    cost = run_bounded(counted, "etaoin" * 4 * MIB)
    assert cost.result is not None and cost.result[:2] == ("invalid_field", "contents[0]")
    assert cost.peak_mib - vocabulary.peak_mib < MOST_MIB


def logprob_entries(tokens: int) -> int:
    """Return the log-probabilities of a chat as JSON."""
    from routes.openai.chat import chat_logprobs
    from routes.response.http_response import to_json
    from rwkv_batch.request import TokenLogprob

    top = [(b"rival", -2.5)] * 20
    return len(to_json(chat_logprobs([TokenLogprob(b"token", -1.0, top)] * tokens)))


def test_log_probabilities_need_little_more_memory_than_their_json() -> None:
    cost = run_bounded(logprob_entries, 10_000, cpu_s=60)
    assert cost.result > 10 * MIB and cost.peak_mib < 5 * cost.result / MIB


class CountingTokenizer:
    """One token per letter. Records the encoded texts."""

    def __init__(self) -> None:
        self.texts = 0

    def encode(self, text: str) -> list[int]:
        self.texts += bool(text)  # a request without a prediction has an empty one
        return [1] * len(text)


def test_the_tokens_of_a_request_have_a_limit() -> None:
    """Many short prompts: no prompt is encoded after the limit is exceeded."""
    from routes.config import HttpConfig
    from routes.request.bodies import PromptBody
    from routes.request.jobs import build_rows
    from rwkv_batch.errors import ServiceError

    body = PromptBody(contents=["four"] * 1000)
    within, beyond, config = CountingTokenizer(), CountingTokenizer(), HttpConfig(max_request_tokens=40)
    assert len(build_rows(within, config, body, ["four"] * 10, [], "contents")) == 10  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match=r"contents\[10\].* 44 tokens .* 40 \(--max-request-tokens\)"):
        build_rows(beyond, config, body, body.contents, [], "contents")  # type: ignore[arg-type]
    assert beyond.texts == 11


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/openai/v1/completions", {"model": "rwkv7", "prompt": [[5] * 220_000] * 5}),
        ("/translate/v1/batch-translate", {"source_lang": "en", "target_lang": "eo", "text_list": []}),
    ],
    ids=["token ids", "texts"],
)
def test_a_request_of_a_million_tokens_is_refused(service: Service, path: str, body: dict[str, Any]) -> None:
    """The engine would receive it in one message. Every stream would wait."""
    if "text_list" in body:
        body = {**body, "text_list": [f"{i} " + "\u4e50\u5c71" * 60_000 for i in range(10)]}
    answer = service.post(path, body)
    assert answer.status_code == (400 if path.startswith("/openai") else 422), answer.text[:300]
    assert "1048576 (--max-request-tokens)" in answer.text and len(answer.text) < 1000


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"model": "m" * 257}, "model"),
        ({"alpha_presence": 100.5}, "alpha_presence"),
        ({"alpha_presence": -100.5}, "alpha_presence"),
        ({"alpha_frequency": 1e300}, "alpha_frequency"),
        ({"alpha_frequency": -101}, "alpha_frequency"),
        ({"alpha_decay": -0.1}, "alpha_decay"),
        ({"alpha_decay": 1.1}, "alpha_decay"),
    ],
)
def test_names_and_penalties_have_limits(body: dict[str, Any], named: str) -> None:
    from routes.openai.request import ChatBody, CompletionBody
    from routes.request.bodies import PromptBody
    from routes.request.json_body import validate
    from rwkv_batch.errors import ServiceError

    for model, good in (
        (PromptBody, {"contents": ["a"]}),
        (ChatBody, {"messages": [MESSAGE]}),
        (CompletionBody, {"prompt": "a"}),
    ):
        with pytest.raises(ServiceError) as refusal:
            validate(model, {**good, **body})
        assert refusal.value.info.field == named
        edge = {
            name: (value[:256] if isinstance(value, str) else max(-100, min(value, 100)))
            for name, value in body.items()
        }
        if named != "alpha_decay":
            validate(model, {**good, **edge})


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m" * 100_000},
        {"model": ["m" * 100_000]},
        {"contents": ["a", {"b": "c" * 100_000}]},
        {"contents": ["a"], "stop_tokens": ["x" * 100_000]},
        {"contents": ["a"], "session_id": "s" * 100_000},
        {"contents": ["a"], "seed": 10**4000},
    ],
    ids=lambda body: "-".join(body),
)
def test_errors_shorten_long_values(service: Service, body: dict[str, Any]) -> None:
    answer = service.post("/v1/chat/completions", body)
    assert answer.status_code == 422
    assert len(answer.content) < 1000


def test_text_may_have_any_number_of_commas() -> None:
    text = ',{[:"' * 500_000
    body = json.dumps({"contents": [text]}).encode()
    assert run_bounded(refused, "PromptBody", body).result == ("taken", None, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/chat/completions"])
@pytest.mark.parametrize("unserved", ["function_call", "audio", "refusal"])
def test_unsupported_message_fields_are_refused_by_name(service: Service, path: str, unserved: str) -> None:
    message = {"role": "assistant", "content": "a", unserved: [{"id": "x"}]}
    answer = service.post(path, {"messages": [MESSAGE, message], "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[1].{unserved}"
    empty: dict[str, Any] = {**message, unserved: None}
    assert service.post(path, {"messages": [MESSAGE, empty], "max_tokens": 1}).status_code == 200


UNSERVED_ASKED: list[dict[str, Any]] = [
    {"audio": {"voice": "x"}},
    {"modalities": ["audio"]},
    {"web_search_options": {"a": 1}},
    {"web_search_options": {}},
    {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}},
    {"verbosity": "low"},
]
NOT_ASKED: dict[str, Any] = {
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "functions": [],
    "function_call": "none",
    "verbosity": "medium",
    "store": True,
    "service_tier": "auto",
}


@pytest.mark.parametrize("body", UNSERVED_ASKED)
@pytest.mark.parametrize("route", ["chat", "completions", "responses"])
def test_unsupported_fields_are_refused_by_name(route: str, body: dict[str, Any]) -> None:
    from routes.openai.request import ChatBody, CompletionBody
    from routes.openai.responses_body import ResponsesBody
    from routes.request.json_body import validate
    from rwkv_batch.errors import ServiceError

    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "chat": (ChatBody, {"messages": [MESSAGE]}),
        "completions": (CompletionBody, {"prompt": "a"}),
        "responses": (ResponsesBody, {"input": "a"}),
    }
    kind, plain = bodies[route]
    with pytest.raises(ServiceError) as refusal:
        validate(kind, {**plain, **body})
    assert str(refusal.value.info.field).partition("[")[0] == next(iter(body))
    validate(kind, {**plain, **NOT_ASKED})
