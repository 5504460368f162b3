"""From a body to the engine's rows: names, stops, seeds, and the limits of prompts, with their exact edges."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from routes.config import HttpConfig
from routes.request import jobs, prompts
from routes.request.bodies import MixedState, ModelFields, PromptBody
from routes.request.jobs import as_turn, build_rows, encode, encode_all, make_job, native_job
from routes.request.model_names import adapter_names, base_name, sanitize_name, state_names
from routes.request_context import RequestContext, set_current_request
from routes.state import TurnBody
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import ClientLimits, GenerateRequest, Priority
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import SamplingParams

TOKENIZER = Tokenizer()
CONFIG = HttpConfig(max_prompt_tokens=5, max_request_tokens=8, max_contents=3, max_tokens_limit=100)
CONTEXT: Any = SimpleNamespace(tokenizer=TOKENIZER, config=CONFIG)


class PaddedBody(PromptBody):
    """A route's body with another default."""

    pad_zero: bool = True


@pytest.fixture(autouse=True)
def request_context() -> RequestContext:
    context = RequestContext(client="key", limits=ClientLimits(rows=6))
    set_current_request(context)
    return context


def refusal(call: Any, *arguments: Any, **named: Any) -> tuple[str | None, str, Any]:
    """Return field, message and value of the error."""
    with pytest.raises(ServiceError) as caught:
        call(*arguments, **named)
    info = caught.value.info
    assert info.kind is ErrorKind.INVALID_FIELD
    return info.field, info.message, info.given


def rows_of(config: HttpConfig = CONFIG, n: int = 1, **fields: Any) -> list[GenerateRequest]:
    body = PromptBody(**{"contents": [" a"], "max_tokens": 100, **fields})
    return build_rows(TOKENIZER, config, body, body.contents, body.stop_tokens, "contents", n)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_prompt_may_have_exactly_the_limit(is_text: bool) -> None:
    ids = TOKENIZER.encode(" a") * 6
    prompts = [" a" * count if is_text else ids[:count] for count in range(7)]
    assert encode(TOKENIZER, prompts[5], "f", CONFIG) == ids[:5]
    expected = "f: has 6 tokens, the limit is 5 (--max-prompt-tokens); send a shorter prompt"
    assert refusal(encode, TOKENIZER, prompts[6], "f", CONFIG) == ("f", expected, 6)
    assert refusal(encode, TOKENIZER, prompts[5], "f", CONFIG, pad_zero=True) == ("f", expected, 6)
    assert encode(TOKENIZER, prompts[4], "f", CONFIG, pad_zero=True) == [0, *ids[:4]]
    assert refusal(encode, TOKENIZER, prompts[0], "f", CONFIG)[:2] == ("f", "f: must not be empty")


def test_a_text_far_above_the_limit_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_SLICE_CHARACTERS", 8)
    assert refusal(encode, TOKENIZER, " a" * 11, "f", CONFIG)[1:] == (
        "f: has more than 11 tokens, the limit is 5 (--max-prompt-tokens); send a shorter prompt",
        11,
    )
    assert refusal(encode, TOKENIZER, " a" * 500, "f", CONFIG)[2] == 12, "it stops at the first slice above"
    long_word = " " * 24  # more characters than four times the limit, but few tokens
    assert len(encode(TOKENIZER, long_word, "f", CONFIG)) <= 5


def test_prompts_may_have_exactly_the_total_limit() -> None:
    texts = [("f[0]", " a" * 4), ("f[1]", " a" * 4), ("f[2]", " a")]
    assert sum(map(len, encode_all(TOKENIZER, texts[:2], CONFIG))) == 8
    field, message, given = refusal(lambda: list(encode_all(TOKENIZER, texts, CONFIG)))
    assert (field, given) == ("f[2]", 9)
    assert message == (
        "f[2]: with it the request's prompts have 9 tokens or more, the limit is 8 (--max-request-tokens); "
        "send fewer prompts at once"
    )


def test_rows_have_the_fields_of_the_body() -> None:
    body = {"stop_tokens": [7, "b", 0, 7, "a"], "ignore_eos": True, "chunk_size": 9, "max_tokens": 100}
    body |= {"use_prefix_cache": False, "pad_zero": True, "temperature": 0.5, "top_k": 3}
    [row] = rows_of(**body)
    assert (row.prompt, row.max_tokens, row.stop_ids, row.stop_strings) == (
        [0, *TOKENIZER.encode(" a")],
        100,
        [7],
        [b"a", b"b"],
    )
    assert (row.ignore_eos, row.use_prefix_cache, row.chunk_size, row.n) == (True, False, 0, 1)
    assert (row.sampling.temperature, row.sampling.top_k) == (0.5, 3)
    assert rows_of(**body, stream=True)[0].chunk_size == 9
    constrained = PromptBody(contents=[" a"], regex="a+")
    assert row.constraint is None and rows_of(regex="a+")[0].constraint == constrained.constraint is not None


def test_no_two_answers_of_a_request_share_a_seed() -> None:
    rows = rows_of(contents=[" a"] * 3, seed=2**64 - 3, n=2)
    assert [(row.sampling.seed, row.n) for row in rows] == [(2**64 - 3, 2), (2**64 - 1, 2), (1, 2)]
    assert rows_of()[0].sampling.seed != rows_of()[0].sampling.seed, "without a seed each request has its own"


def test_counts_of_prompts_rows_and_tokens_are_limited(request_context: RequestContext) -> None:
    assert len(rows_of(contents=[" a"] * 3)) == 3
    assert refusal(rows_of, contents=[" a"] * 4) == (
        "contents",
        "contents: has 4 prompts, the limit is 3 (--max-contents); send several requests",
        4,
    )
    assert refusal(rows_of, max_tokens=101)[:2] == (
        "max_tokens",
        "max_tokens: must be at most 100 (--max-tokens-limit), got 101",
    )
    assert refusal(rows_of, max_completion_tokens=101)[0] == "max_completion_tokens"
    assert len(rows_of(contents=[" a"] * 3, n=2)) == 3
    assert refusal(rows_of, contents=[" a"] * 3, n=3)[2] == 9
    mixture = [{"name": "x"}, {"name": "y"}]
    assert [row.mixture for row in rows_of(contents=[" a"] * 3, states=mixture)] == [[("x", 1.0), ("y", 1.0)]] * 3
    assert [row.state for row in rows_of(states=mixture)] == [""]
    assert refusal(rows_of, contents=[" a"] * 2, states=mixture, n=2)[2] == 8


def test_token_zero_comes_before_a_state_only_if_it_is_given() -> None:
    ids = TOKENIZER.encode(" a")
    assert [row.prompt for row in rows_of(pad_zero=True, state="poet")] == [[0, *ids]]
    assert rows_of(pad_zero=True, states=[{"name": "poet"}])[0].prompt == [0, *ids]
    default = PaddedBody(contents=[" a"], max_tokens=1)
    assert build_rows(TOKENIZER, CONFIG, default, [" a"], [], "contents")[0].prompt == [0, *ids]
    for state in ({"state": "poet"}, {"states": [MixedState(name="poet")]}):
        with_state = default.model_copy(update=state)
        assert build_rows(TOKENIZER, CONFIG, with_state, [" a"], [], "contents")[0].prompt == ids


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("rwkv7", ("", "")),
        ("another", ("", "")),
        ("rwkv7x:poet", ("", "")),
        ("rwkv7:poet", ("", "poet")),
        ("rwkv7 poet", ("", "poet")),
        ("rwkv7+formal", ("formal", "")),
        ("rwkv7+formal:poet", ("formal", "poet")),
        ("rwkv7+formal poet", ("formal", "poet")),
        ("rwkv7:a poet!", ("", "a-poet-")),
        ("rwkv7:latest", ("", "")),
        ("rwkv7+formal:latest", ("formal", "")),
        ("rwkv7:poet:latest", ("", "poet")),
    ],
)
def test_a_model_name_may_name_adapter_and_state(model: str, expected: tuple[str, str]) -> None:
    body = ModelFields(model=model)
    assert (jobs.requested_adapter(body, CONFIG), jobs.requested_state(body, CONFIG)) == expected
    [row] = rows_of(model=model)
    assert (row.adapter, row.state) == expected


def test_two_different_names_are_refused() -> None:
    same = ModelFields(model="rwkv7+formal:poet", state="poet", adapter="formal")
    assert (jobs.requested_adapter(same, CONFIG), jobs.requested_state(same, CONFIG)) == ("formal", "poet")
    other = ModelFields(model="rwkv7+formal:poet", state="x", adapter="y")
    assert refusal(jobs.requested_adapter, other, CONFIG) == (
        "adapter",
        "adapter: model 'rwkv7+formal:poet' names adapter 'formal', field adapter another one; give one of them",
        "y",
    )
    assert refusal(jobs.requested_state, other, CONFIG) == (
        "state",
        "state: model 'rwkv7+formal:poet' names tuned state 'poet', field state another one; give one of them",
        "x",
    )


def test_names_in_the_list_of_models_are_understood() -> None:
    assert state_names("m", "poet") == ["m:poet", "m poet"] and adapter_names("m", "formal") == ["m+formal"]
    assert [base_name(name, "m-1") for name in ("m-1", "m 1", "m-1:x", "m-1+x", "m-12", "m")] == [
        "m-1", "m-1", "m-1", "m-1", None, None,
    ]  # fmt: skip
    assert sanitize_name("A z/0._-é") == "A-z-0._--"


def test_a_greedy_row_is_whole_and_greedy() -> None:
    row = jobs.greedy_row([1, 2], 9, [3, "x", 0], "poet", "formal")
    assert (row.prompt, row.max_tokens, row.stop_ids, row.stop_strings) == ([1, 2], 9, [3], [b"x"])
    assert (row.sampling, row.chunk_size, row.state, row.adapter) == (
        SamplingParams(temperature=0.0),
        0,
        "poet",
        "formal",
    )
    plain = jobs.greedy_row([1], 1, [])
    assert (plain.state, plain.adapter) == ("", "")


def test_a_turn_has_one_prompt_and_a_limit_of_tokens_that_are_read_again() -> None:
    [row] = rows_of()
    [turn] = asyncio.run(as_turn(CONTEXT, [row], " a", "s", " a", "contents", branch_from=3, wait=False))
    session = turn.session
    assert session is not None and turn.prompt == row.prompt
    assert (session.session_id, session.branch_from, session.wait, session.max_replayed_tokens) == ("s", 3, False, 8)
    [plain] = asyncio.run(as_turn(CONTEXT, [row], " a", "s", " a", "contents"))
    assert plain.session is not None and (plain.session.branch_from, plain.session.wait) == (None, True)
    [by_ids] = asyncio.run(as_turn(CONTEXT, [row], [1, 2], "s", [3, 4], "contents"))
    assert by_ids.session is not None and by_ids.session.resume_prompt == [3, 4]
    assert refusal(lambda: asyncio.run(as_turn(CONTEXT, [row] * 2, " a", "s", " a", "contents"))) == (
        "contents",
        "contents: a session takes exactly one prompt per request, got 2",
        2,
    )
    long = [1] * 6
    assert refusal(lambda: asyncio.run(as_turn(CONTEXT, [row], " a", "s", long, "contents")))[0] == "contents"


def test_a_job_has_the_fields_of_its_body() -> None:
    body = PromptBody(contents=[" a"], timeout_s=3.0, priority="batch", cache_salt="x")
    made = make_job(rows_of(), body, "/route", "naive")
    assert (made.sampler, made.timeout_s, made.label, made.priority, made.cache_salt) == (
        "naive", 3.0, "/route", Priority.BATCH, "x",
    )  # fmt: skip
    assert make_job([], body, "").job_id != made.job_id and make_job([], body, "").sampler == ""


def test_a_native_job_of_a_session_continues_with_the_new_messages() -> None:
    wide: Any = SimpleNamespace(tokenizer=TOKENIZER, config=HttpConfig())
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    body = PromptBody.model_validate({"messages": messages, "session_id": "s", "wait": False})
    made = asyncio.run(native_job(wide, body, "/route", "naive"))
    [row] = made.rows
    assert row.session is not None and (row.session.session_id, row.session.wait) == ("s", False)
    assert TOKENIZER.decode_bytes(row.prompt).startswith(b"User: one\n\nAssistant: two\n\nUser: three\n\nAssistant:")
    assert TOKENIZER.decode_bytes(row.session.resume_prompt).startswith(b"\n\nUser: three\n\nAssistant:")
    assert (made.label, made.sampler) == ("/route", "naive")
    plain = asyncio.run(native_job(wide, PromptBody(contents=["a", "b"]), "/route"))
    assert [row.session for row in plain.rows] == [None, None]


def test_each_prompt_form_has_its_stops_and_field() -> None:
    talk = {"messages": [{"role": "user", "content": "a"}]}
    forms = [
        ({"contents": ["a"]}, (["a"], [0, 261, 24281], "contents")),
        ({"contents": ["a"], "stop_tokens": [5], "stop": "x"}, (["a"], [5, "x"], "contents")),
        ({"prefix": "a", "suffix": "b"}, (["✿prefix✿✿suffix✿b✿middle✿a"], ["✿"], "prefix")),
    ]
    for fields, expected in forms:
        prompts, stops, field = jobs.prompts_and_stops(PromptBody.model_validate(fields))
        assert (prompts, field) == (expected[0], expected[2]) and list(stops)[: len(expected[1])] == expected[1]
    prompts, stops, field = jobs.prompts_and_stops(PromptBody.model_validate(talk | {"enable_think": True}))
    assert prompts == ["User: a\n\nAssistant: <think"] and field == "messages"
    assert stops == [0, "\n\nUser:", "\n\nSystem:", "\n\nAssistant:"]
    constrained = PromptBody.model_validate(talk | {"regex": "a+", "stop": ["y"]})
    assert jobs.prompts_and_stops(constrained)[1] == ["y"], "a constraint ends the text"


TEXTS = [
    "User: hi\n\nAssistant:",
    "\nUser: hi",
    " x",
    "\n\nUser: hi",
    "\n\n\nUser",
    "你好",
    "\t\n",
    "\r\n a",
    "0",
    "é" * 9,
]
LONG = "The river ran past the mill. " * 40


class Counting(Tokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)


def turn_of(
    text: str, tokenizer: Tokenizer, pad_zero: bool = False, resume: str | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids for a new session and for an existing one."""
    body = TurnBody(contents=[text], session_id="s", pad_zero=pad_zero)
    context = SimpleNamespace(tokenizer=tokenizer, config=HttpConfig())
    rows = build_rows(tokenizer, context.config, body, [text], [], "contents")
    [row] = asyncio.run(as_turn(context, rows, text, "s", text if resume is None else resume, "contents[0]"))  # type: ignore[arg-type]
    assert row.session is not None and isinstance(row.sampling, SamplingParams)
    return row.prompt, row.session.resume_prompt


@pytest.mark.parametrize("text", [*TEXTS, LONG])
@pytest.mark.parametrize("pad_zero", [False, True])
def test_the_ids_are_those_of_the_whole_text(text: str, pad_zero: bool) -> None:
    tokenizer = Tokenizer()
    prompt, resume = turn_of(text, tokenizer, pad_zero)
    assert prompt == [0] * pad_zero + tokenizer.encode(text)
    assert resume == tokenizer.encode(prompts.continuation_prompt(text))


def test_a_long_prompt_is_tokenised_once() -> None:
    tokenizer = Counting()
    turn_of(LONG, tokenizer)
    assert [length for length in tokenizer.lengths if length >= len(LONG)] == [len(LONG)]


def test_another_text_for_an_existing_session_is_encoded() -> None:
    tokenizer = Tokenizer()
    assert turn_of(LONG, tokenizer, resume="User: bye")[1] == tokenizer.encode("\n\nUser: bye")
