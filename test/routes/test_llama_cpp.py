"""llama.cpp's routes. The fake engine says the text in the prompt."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rwkv_batch.tokenizer import Tokenizer
from test.serving import Service

SAY: dict[str, Any] = {"prompt": "say One.\u2028Two."}


def events(text: str) -> list[Any]:
    """Return a stream's values. It has no [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_stream_has_the_text_of_the_whole_answer(fake: Service) -> None:
    whole = fake.post("/completion", {**SAY, "repeat_penalty": 1.1, "min_pe": 0.05, "samplers": ["top_k"]}).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("One.\u2028Two.", True, "eos")
    assert [one["field"] for one in whole["warnings"]] == ["min_pe"]
    answer = fake.post("/completion", {**SAY, "stream": True})
    assert "[DONE]" not in answer.text and answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(answer.text)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert not any(part["stop"] for part in parts) and last["stop"] and last["content"] == ""
    assert last["tokens_evaluated"] == whole["tokens_evaluated"] == len(Tokenizer().encode(SAY["prompt"]))
    assert last["timings"]["predicted_n"] == last["tokens_predicted"] == whole["tokens_predicted"]


def test_stops_seeds_ids_and_probabilities(service: Service) -> None:
    ask = {"prompt": "Hello", "n_predict": 30, "temperature": 0, "ignore_eos": True, "seed": -1}
    text = service.post("/completion", ask).json()["content"]
    cut = service.post("/completion", {**ask, "stop": ["no such text", text[3:6]]}).json()
    assert (cut["content"], cut["stop_type"], cut["stopping_word"]) == (
        text[: text.index(text[3:6])],
        "word",
        text[3:6],
    )
    ids = service.post("/tokenize", {"content": "Hello"}).json()["tokens"]
    same = service.post("/completion", {**ask, "prompt": ids, "n_probs": 2, "stream": True})
    parts = events(same.text)
    assert "".join(part["content"] for part in parts) == text and parts[-1]["stop_type"] == "limit"
    tokens = [one for part in parts for one in part["completion_probabilities"]]
    assert len(tokens) == 30 and all(len(one["top_logprobs"]) == 2 for one in tokens)
    assert not any(part["tokens"] for part in parts)
    for stream in (False, True):
        answer = service.post("/completion", {**ask, "return_tokens": True, "stream": stream})
        given = events(answer.text) if stream else [answer.json()]
        ids = [token for part in given for token in part["tokens"]]
        assert len(ids) == 30 and service.post("/detokenize", {"tokens": ids}).json()["content"] == text
        assert "completion_probabilities" not in given[0]
    first = Tokenizer().encode(tokens[0]["token"])[0]
    other = service.post("/completion", {**ask, "logit_bias": [[first, False]], "n_predict": 1}).json()
    assert not text.startswith(other["content"])
    by_text: tuple[Any, ...] = ([[tokens[0]["token"], False]], {tokens[0]["token"]: -100}, {str(first): False})
    for bias in by_text:
        banned = service.post("/completion", {**ask, "logit_bias": bias, "n_predict": 1}).json()
        assert banned["content"] == other["content"], bias
    schema = {"enum": ["a", "b"]}
    chosen = service.post("/completion", {"prompt": "Hello", "json_schema": schema, "n_predict": 20}).json()["content"]
    assert json.loads(chosen) in ("a", "b")
    assert service.post("/completion", {"prompt": "Hello", "n_predict": 0}).json()["content"] == ""


def test_a_list_of_prompts(fake: Service) -> None:
    """Its answer is a list, a stream's events have the prompt's index. One prompt in a list gets one object."""
    ids = Tokenizer().encode("say Three.")
    body = {"prompt": ["say One.", ids], "min_pe": 1}
    first, second = fake.post("/completion", body).json()
    assert [(one["index"], one["content"], one["prompt"]) for one in (first, second)] == [
        (0, "One.", "say One."),
        (1, "Three.", ids),
    ]
    assert second["tokens_evaluated"] == len(ids) and "warnings" in first
    parts = events(fake.post("/completion", {**body, "stream": True}).text)
    for one in (first, second):
        own = [part for part in parts if part["index"] == one["index"]]
        assert "".join(part["content"] for part in own) == one["content"] and own[-1]["stop"]
        assert own[-1]["tokens_predicted"] == one["tokens_predicted"]
    assert fake.post("/completion", {"prompt": ["say One."]}).json()["content"] == "One."
    for wrong in ([["a"], 1], [{}], ["a", -1], ["a", 65_536], ["a", True], [[]], []):
        error = fake.post("/completion", {"prompt": wrong}).json()["error"]
        assert error["param"].startswith("prompt") and "union" not in error["message"], (wrong, error)


def test_ids_and_texts_in_one_prompt(fake: Service) -> None:
    """They are joined, as llama.cpp does it; in a list of prompts too."""
    encode = Tokenizer().encode
    mixed = ["say ", *encode("One"), "."]
    ids = encode("say ") + encode("One") + encode(".")
    answer = fake.post("/completion", {"prompt": mixed}).json()
    assert (answer["content"], answer["prompt"], answer["tokens_evaluated"]) == ("One.", ids, len(ids))
    both = fake.post("/completion", {"prompt": ["say Two.", mixed]}).json()
    assert [one["prompt"] for one in both] == ["say Two.", ids]
    long = fake.post("/completion", {"prompt": ["ab " * 1_000_000, 1]}).json()["error"]
    assert "has more than" in long["message"], "counted without encoding all of it"


def test_invocations_take_a_conversation_or_a_prompt(fake: Service) -> None:
    """vLLM's route for SageMaker."""
    chat = fake.post("/invocations", {"messages": [{"role": "user", "content": "say One."}]}).json()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"] == "One."
    raw = fake.post("/invocations", {"prompt": "say One."}).json()
    assert raw["object"] == "text_completion" and raw["choices"][0]["text"] == "One."
    error = fake.post("/invocations", {}).json()["error"]
    assert error["param"] == "messages" and "messages or prompt" in error["message"]


def test_infill(fake: Service) -> None:
    answer = fake.post("/infill", {"input_prefix": "a", "prompt": "(", "input_suffix": ")", "n_predict": 1}).json()
    assert answer["prompt"] == "✿prefix✿✿suffix✿)✿middle✿a("
    assert fake.post("/infill", {"prompt": "a"}).json()["error"]["param"] == "input_prefix"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 2_000_000}, "n_predict"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"logit_bias": [[70_000, 1.0]]}, "logit_bias"),
        ({"logit_bias": [["", 1.0]]}, "logit_bias"),
        ({"logit_bias": [["a" * 65, 1.0]]}, "logit_bias"),
        ({"logit_bias": [["33155", 1.0]]}, "logit_bias"),
        ({"logit_bias": [[-5, 1.0]]}, "logit_bias"),
        ({"n_probs": 20, "n_predict": 1_000_000}, "n_probs"),
        ({"prompt": ["a", ["b", None]]}, "prompt"),
        ({"model": "ft:a"}, "model"),
    ],
)
def test_what_is_refused(fake: Service, fields: dict[str, Any], param: str) -> None:
    """Errors name fields of llama.cpp, not those of the OpenAI routes."""
    refused = fake.post("/completion", {**SAY, **fields})
    error = refused.json()["error"]
    assert refused.status_code in (400, 404) and re.split(r"[\[]", error["param"])[0] == param, refused.text
    assert "max_tokens" not in error["message"]


def test_a_gap_that_is_too_long_names_its_field(fake: Service) -> None:
    refused = fake.post("/infill", {"input_prefix": "a b " * 300_000, "input_suffix": ""})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_prefix", refused.text


def test_an_error_in_a_stream_is_its_last_event(fake: Service) -> None:
    *_, last = events(fake.post("/completion", {"prompt": "break", "stream": True}).text)
    assert last["error"]["message"] == "broken on demand"


def test_tokens_and_templates(fake: Service) -> None:
    tokens = fake.post("/tokenize", {"content": "é€", "with_pieces": True}).json()["tokens"]
    pieces = [bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode() for one in tokens]
    assert b"".join(pieces) == "é€".encode()
    ids = fake.post("/tokenize", {"content": "é€", "add_special": True}).json()["tokens"]
    assert fake.post("/detokenize", {"tokens": ids}).json()["content"] == "é€"
    assert fake.post("/tokenize", {"content": "a", "prompt": "a"}).status_code == 422
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    prompt = fake.post("/apply-template", body).json()["prompt"]
    assert prompt == "System: Be brief.\n\nUser: Hi\n\nAssistant: <think>\n</think>"
    assert fake.post("/apply-template", {}).status_code == 422


def test_properties_and_slots(fake: Service) -> None:
    props = fake.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 262_144 and props["total_slots"] >= 1
    fake.wait_idle()
    assert not fake.get("/slots").json()[0]["is_processing"]
    assert fake.get("/version").json()["version"] and fake.get("/ping").status_code == 200
