"""`/v1/score` and the tokenizer routes, compared with a separate forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test.conftest import rest_slow
from test.harness import TOKENIZER
from test.logprob_oracle import LogprobOracle
from test.serving import Service

PATH = "/v1/score"
CONTENTS = ["The capital of France is", "猫は" * 40, "x"]
CANDIDATES = [" Paris", " a river.", "猫", "\n\nUser: no"]
EVERY = {"contents": CONTENTS, "candidates": CANDIDATES, "logprobs": True}


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> LogprobOracle:
    return LogprobOracle(tiny_model)


def scores_of(service: Service, **body: Any) -> dict[str, Any]:
    response = service.post(PATH, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check(score: dict[str, Any], oracle: LogprobOracle, prompt: list[int], candidate: list[int]) -> None:
    expected = oracle.token_logprobs(prompt + candidate, len(prompt))
    assert score["tokens"] == len(candidate)
    assert score["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert score["logprob"] == pytest.approx(sum(expected), abs=1e-4)
    likeliest = oracle.logprobs(prompt + candidate)[len(prompt) - 1 : -1].argmax(dim=1).tolist()
    assert score["is_greedy"] == (likeliest == candidate)


@pytest.mark.parametrize("pad_zero", rest_slow([True, False]))
def test_every_candidate_after_every_prompt(service: Service, oracle: LogprobOracle, pad_zero: bool) -> None:
    contents = [*CONTENTS, ""] if pad_zero else CONTENTS
    answer = scores_of(service, **{**EVERY, "contents": contents, "pad_zero": pad_zero, "model": "mine"})
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("score", "mine", "score-")
    prompts = [[0] * pad_zero + TOKENIZER.encode(content) for content in contents]
    candidates = [TOKENIZER.encode(candidate) for candidate in CANDIDATES]
    assert [row["index"] for row in answer["scores"]] == list(range(len(contents)))
    for row, prompt in zip(answer["scores"], prompts, strict=True):
        assert [score["index"] for score in row["candidates"]] == [0, 1, 2, 3]
        for score, candidate in zip(row["candidates"], candidates, strict=True):
            check(score, oracle, prompt, candidate)
    read = sum(map(len, prompts)) + len(prompts) * sum(map(len, candidates))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == read


def test_a_list_of_candidates_for_each_prompt(service: Service, oracle: LogprobOracle) -> None:
    lists = [[" Paris"], ["猫", "犬"], [" y", " z", " w"]]
    answer = scores_of(service, contents=CONTENTS, candidates=lists)
    assert [len(row["candidates"]) for row in answer["scores"]] == [1, 2, 3]
    one = answer["scores"][1]["candidates"][1]
    prompt = TOKENIZER.encode(CONTENTS[1])
    assert one["logprob"] == pytest.approx(
        sum(oracle.token_logprobs(prompt + TOKENIZER.encode("犬"), len(prompt))), abs=1e-4
    )
    assert "token_logprobs" not in one


def test_the_models_own_text_is_greedy(service: Service) -> None:
    body = {"prompt": CONTENTS[0], "max_tokens": 3, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    body |= {"alpha_presence": 0, "alpha_frequency": 0, "logit_bias": {"0": -100}}
    said = service.post("/openai/v1/completions", body).json()["choices"][0]
    tokens = said["logprobs"]["tokens"]
    if TOKENIZER.encode("".join(tokens)) != [TOKENIZER.encode(token)[0] for token in tokens]:
        pytest.skip("the model's tokens are not those of its text")
    (score,) = scores_of(service, contents=CONTENTS[:1], candidates=["".join(tokens)])["scores"][0]["candidates"]
    assert score["logprob"] == pytest.approx(sum(said["logprobs"]["token_logprobs"]), abs=1e-4)
    assert score["is_greedy"]


def test_a_prompt_is_computed_once(service: Service) -> None:
    content = "A long prompt that is read for all of its candidates. " * 40
    before = service.wait_idle()["computed_tokens"]
    scores_of(service, contents=[content], candidates=[f" {i}" for i in range(50)], use_prefix_cache=False)
    read = service.status()["computed_tokens"] - before
    assert read < len(TOKENIZER.encode(content)) + 50 * 4


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": []}, "contents"),
        ({"candidates": []}, "candidates"),
        ({"contents": [""]}, "contents[0]"),
        ({"candidates": [" a", ""]}, "candidates[1]"),
        ({"candidates": [[" a"], [" b"]]}, "candidates"),
        ({"candidates": [[]]}, "candidates"),
        ({"candidates": [" a"] * 5000}, "candidates"),
        ({"candidates": [[" a", ""]]}, "candidates[0][1]"),
        ({"candidates": [" many tokens" * 200_000]}, "candidates[0]"),
        ({"contents": [f" {i}" for i in range(300)], "candidates": [" many tokens" * 1000] * 2}, "candidates"),
        ({"contents": ["long " * 20_000], "candidates": ["a"] * 2000}, "candidates"),
        ({"candidates": " a"}, "candidates"),
        ({"contents": [" a" * 200_000] * 6}, "contents[5]"),
        ({"timeout_s": -1}, "timeout_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_scoring_requests_are_refused_by_name(service: Service, body: dict[str, Any], field: str) -> None:
    response = service.post(PATH, {"contents": ["The"], "candidates": [" a"], **body})
    assert (response.status_code, response.json()["field"]) == (422, field), response.text


def test_a_timeout_is_504(service: Service) -> None:
    body = {"contents": ["long " * 15_000], "candidates": [" a", " b"], "timeout_s": 0.001, "use_prefix_cache": False}
    assert service.post(PATH, body).status_code == 504


@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_the_tokenizer_routes(service: Service, prefix: str) -> None:
    info = service.get(f"{prefix}/tokenizer_info").json()
    assert service.post(f"{prefix}/tokenize", {"prompt": info["eos_token"]}).json()["tokens"] == [0]
    text = f"def f(x):\n\n{info['eos_token']}猫"
    score = service.post(f"{prefix}/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert (score["tokens"], score["count"]) == (TOKENIZER.encode(text), len(score["tokens"]))
    assert service.post(f"{prefix}/detokenize", {"tokens": [0, *score["tokens"]]}).json() == {
        "prompt": text,
        "content": text,
    }
    refused = service.post(f"{prefix}/detokenize", {"tokens": [65536]})
    assert refused.status_code == (400 if prefix else 422)
    long = service.post(f"{prefix}/tokenize", {"content": "a b " * 200_000})
    assert long.status_code == refused.status_code and "--max-prompt-tokens" in long.text
    assert service.post("/v1/tokens/count", {"text": "a b " * 200_000}).json() == {"tokens": 400_001}
