"""Samplers beyond top_k and top_p: their fields in every dialect, and what they do to an answer."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from programs.library.params import SamplingParams as LibraryParams
from programs.library.params import chat_body, completion_body
from routes.anthropic.request import MessagesBody
from routes.llama_cpp.completion import CompletionPrompt
from routes.ollama.request import OllamaChatBody, OllamaGenerateBody
from routes.openai.request import ChatBody, CompletionBody
from routes.request.bodies import PromptBody
from routes.request.sampler_fields import SamplerName, with_texts
from rwkv_batch.errors import ServiceError
from rwkv_batch.tokenizer import Tokenizer
from sampling.params import DEFAULT_ORDER, Filters, SamplingParams
from test.serving import Service

GIVEN: dict[str, Any] = {
    "min_p": 0.05,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.002,
    "top_n_sigma": 1,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "repetition_penalty": 1.2,
    "repeat_last_n": 32,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 100,
    "dynatemp_range": 0.1,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "min_tokens": 3,
}
TEXTS: dict[str, Any] = {"samplers": ["top_k", "xtc"], "dry_sequence_breakers": ["\n"]}
EXPECTED = Filters(**GIVEN, samplers=("top_k", "xtc"), dry_sequence_breakers=("\n",))
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOKENIZER = Tokenizer()


def by_dialect(**fields: Any) -> dict[str, SamplingParams]:
    options: dict[str, Any] = {"options": fields}
    bodies: dict[str, Any] = {
        "native": PromptBody.model_validate({"contents": ["a"], **fields}),
        "chat": ChatBody.model_validate({**CHAT, **fields}),
        "completions": CompletionBody.model_validate({"prompt": "a", **fields}),
        "llama.cpp": CompletionPrompt.model_validate({"prompt": "a", **fields}).raw("a"),
        "ollama chat": OllamaChatBody.model_validate({**CHAT, **options}).chat(),
        "ollama generate": OllamaGenerateBody.model_validate({"prompt": "a", "raw": True, **options}).request(),
    }
    return {name: body.row_sampling(TOKENIZER.encode) for name, body in bodies.items()}


def test_every_number_has_a_field_in_every_dialect() -> None:
    assert GIVEN.keys() | TEXTS.keys() | {"bad_words"} == set(Filters.__struct_fields__)
    for name, params in by_dialect(**GIVEN, **TEXTS).items():
        assert params.filters == EXPECTED, name
    assert {params.filters for params in by_dialect().values()} == {None}
    assert get_args(SamplerName) == DEFAULT_ORDER


def test_top_k_of_minus_one_is_off() -> None:
    """vLLM's and llama.cpp's clients send it."""
    options = {"options": {"top_k": -1}}
    bodies = [
        ChatBody.model_validate({**CHAT, "top_k": -1}),
        CompletionPrompt.model_validate({"prompt": "a", "top_k": -1}).raw("a"),
        OllamaChatBody.model_validate({**CHAT, **options}).chat(),
        MessagesBody.model_validate({**CHAT, "max_tokens": 1, "top_k": -1}).chat(),
    ]
    assert [body.row_sampling(TOKENIZER.encode).top_k for body in bodies] == [0, 0, 0, 0]


def test_llama_cpps_name_and_window_of_the_repetition_penalty() -> None:
    for name, params in by_dialect(repeat_penalty=1.3).items():
        filters = params.filters
        window = 64 if name.startswith(("llama", "ollama")) else -1
        assert filters is not None and (filters.repetition_penalty, filters.repeat_last_n) == (1.3, window), name
    both = by_dialect(repeat_penalty=1.3, repetition_penalty=1.1)["chat"].filters
    assert both is not None and both.repetition_penalty == 1.1


def test_the_librarys_parameters_become_fields() -> None:
    extra = {"xtc_probability": 0.5, "samplers": "xt"}
    params = LibraryParams(min_p=0.1, min_tokens=2, bad_words=["zqj"], truncate_prompt_tokens=3, extra_args=extra)
    for body in (completion_body(["a"], params, 0, None, False), chat_body(CHAT["messages"], params, 0, None, False)):
        filters = body.row_sampling(TOKENIZER.encode).filters
        assert filters is not None and (filters.min_p, filters.min_tokens, filters.xtc_probability) == (0.1, 2, 0.5)
        assert filters.samplers == ("xtc", "temperature") and filters.bad_words and body.truncate_prompt_tokens == 3
    with pytest.raises(TypeError, match="extra_args: xtc_probabilty are no fields of a request"):
        completion_body(["a"], LibraryParams(extra_args={"xtc_probabilty": 1}), 0, None, False)


def test_letters_are_names_of_samplers() -> None:
    letters = by_dialect(samplers="edskypmxt")["chat"].filters
    names = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    assert letters is not None and letters.samplers == names
    with pytest.raises(ValidationError, match=r"has the letter 'z'; allowed are e \(penalties\), d \(dry\)"):
        ChatBody.model_validate({**CHAT, "samplers": "kz"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1), ("min_p", "0.1"), ("typical_p", 0), ("mirostat", 3), ("repeat_last_n", -2),
        ("repetition_penalty", 0), ("samplers", ["top_a"]), ("samplers", ["xtc"] * 17), ("min_tokens", -1),
        ("dry_sequence_breakers", ["é" * 17]), ("dry_sequence_breakers", ["a"] * 9), ("bad_words", [""]),
    ],
)  # fmt: skip
def test_values_outside_their_limits_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate({**CHAT, field: value})
    assert refused.value.errors()[0]["loc"][0] == field


def test_texts_become_tokens() -> None:
    hello, spaced = TOKENIZER.encode("Hello"), TOKENIZER.encode(" Hello")
    two = TOKENIZER.encode("zqj")
    assert len(hello) == len(spaced) == 1 and len(two) > 1
    bias = {"Hello": -math.inf, "zqj": 1.5}
    params = with_texts(SamplingParams(logit_bias={two[0]: 1.0}), TOKENIZER.encode, ["Hello", "zqj"], bias)
    assert params.logit_bias == {hello[0]: -math.inf, spaced[0]: -math.inf, two[0]: 2.5} | dict.fromkeys(two[1:], 1.5)
    assert params.filters is not None and tuple(two) in params.filters.bad_words
    with pytest.raises(ServiceError, match=r"bad_words\[0\]: has \d+ tokens, the limit is 32"):
        with_texts(SamplingParams(), TOKENIZER.encode, ["zqj" * 30], {})


def test_answers_follow_the_fields(service: Service) -> None:
    ask = {"prompt": "The river", "max_tokens": 12, "temperature": 0, "stop_tokens": [0], "alpha_presence": 0}

    def answer(**fields: Any) -> Any:
        got = service.post("/openai/v1/completions", {**ask, **fields}).json()
        assert "warnings" not in got, got
        return got["choices"][0]

    text = answer(ignore_eos=True)["text"]
    stop = text[2:5]
    assert answer(ignore_eos=True, stop=stop)["text"] == text[:2]
    assert answer(ignore_eos=True, stop=stop, include_stop_str_in_output=True)["text"] == text[:5]
    longer = answer(ignore_eos=True, stop=stop, min_tokens=8)
    assert longer["text"].startswith(text[:5])
    first, second, *_ = answer(ignore_eos=True, logprobs=0)["logprobs"]["tokens"]
    assert not answer(ignore_eos=True, logit_bias={first: -100})["text"].startswith(first)
    assert not answer(ignore_eos=True, bad_words=[first])["text"].startswith(first)
    if TOKENIZER.encode(first + second) == [*TOKENIZER.encode(first), *TOKENIZER.encode(second)]:
        assert not answer(ignore_eos=True, bad_words=[first + second])["text"].startswith(first + second)
    ids = TOKENIZER.encode("The river")
    kept = answer(prompt=[5, 6, *ids], truncate_prompt_tokens=len(ids))
    assert kept["text"] == answer()["text"]
    whole = answer(prompt=[5, 6, *ids], truncate_prompt_tokens=-1)  # at most the limit of a prompt
    assert whole["text"] == answer(prompt=[5, 6, *ids])["text"] != kept["text"]


def test_what_cannot_be_combined_is_refused(service: Service) -> None:
    for field, more in {
        "min_tokens": {"min_tokens": 2, "regex": "a"},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 2, "session_id": "s"},
    }.items():
        refused = service.post("/openai/v1/completions", {"prompt": "a", "max_tokens": 1, **more})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_a_thought_has_at_most_its_budget(service: Service) -> None:
    ask = {**CHAT, "max_tokens": 40, "enable_think": True, "seed": 3, "thinking_token_budget": 5}
    answer = service.post("/openai/v1/chat/completions", ask).json()["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"]
    assert len(TOKENIZER.encode(answer["message"]["reasoning_content"])) <= 8
    message = {**CHAT, "model": "rwkv7", "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 5}}
    content = service.post("/v1/messages", message, headers={"anthropic-version": "2023-06-01"}).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]


def test_bodies_without_samplers_share_their_defaults() -> None:
    """Each body without the fields would build the filters and copy every list, a third of its handling."""
    for model in (PromptBody, ChatBody, CompletionBody):
        first, second = (model.model_validate(CHAT if model is not CompletionBody else {"prompt": "a"}) for _ in "ab")
        assert first.filters == first.make_filters()
        assert first.dry_sequence_breakers is second.dry_sequence_breakers
    given = PromptBody.model_validate({**CHAT, "repeat_penalty": 1.3})
    assert given.filters is not None and given.filters.repetition_penalty == 1.3
