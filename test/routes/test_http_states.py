"""Tuned states over HTTP: loaded, listed, used on any route, removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.serving import Service, row_texts, sse_data
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

PLAIN = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stop_tokens": []}
ADMIN = {"Authorization": "Bearer the boss"}
PROMPT = "User: hi\n\nAssistant:"


def state_of(seed: int) -> Any:
    return random_state(seed, layers=2, width=64, scale=2.0)


@pytest.fixture(scope="module")
def tuned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tuned")
    write_state(folder / "poet.pth", state_of(1))
    (folder / "models").mkdir()
    write_state(folder / "models" / "clerk.pth", state_of(2))
    arguments = ("--state", f"poet={folder / 'poet.pth'}", "--state", f"other={folder / 'poet.pth'}")
    arguments += ("--models-dir", str(folder / "models"), "--admin-password", "the boss", "--http-workers", "1")
    with Service(folder, "--model-path", str(tiny_model), *arguments) as running:
        yield running


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def generate(service: Service, path: str = "/v1/chat/completions", **fields: Any) -> str:
    return text_of(service.post(path, {**PLAIN, "contents": [PROMPT], "stream": False, **fields}))


def names(service: Service) -> list[str]:
    return [entry["name"] for entry in service.get("/v1/states").json()["data"]]


def test_states_are_listed_alone_and_among_the_models(tuned: Service) -> None:
    (poet, _) = tuned.get("/v1/states").json()["data"][:2]
    assert poet["name"] == "poet" and poet["models"] == ["rwkv7:poet", "rwkv7 poet"]
    assert poet["orientation"] == "value_key" and ".pth" in poet["orientation_reason"] and not poet["error"]
    for path in ("/v1/models", "/openai/v1/models"):
        assert {"rwkv7", "rwkv7:poet", "rwkv7 poet"} <= {model["id"] for model in tuned.get(path).json()["data"]}
    assert tuned.get("/openai/v1/models/rwkv7:poet").json()["id"] == "rwkv7:poet"
    assert "'rwkv7:poet'" in tuned.get("/openai/v1/models/nobody").json()["error"]["message"]


def test_every_way_to_name_a_state(tuned: Service) -> None:
    plain, expected = generate(tuned), generate(tuned, state="poet")
    assert plain != expected
    assert generate(tuned, model="rwkv7:poet") == generate(tuned, model="rwkv7 poet") == expected
    assert generate(tuned, model="rwkv7:poet", state="poet") == expected
    assert generate(tuned, state=None) == generate(tuned, state="") == plain
    streamed = tuned.post("/v1/chat/completions", {**PLAIN, "contents": [PROMPT], "state": "poet", "stream": True})
    assert row_texts(sse_data(streamed.text)) == {0: expected}


def test_every_route_takes_a_state(tuned: Service) -> None:
    expected, plain = generate(tuned, state="poet"), generate(tuned)
    # /v2 adds token 0 to prompts, but not after a tuned state.
    assert generate(tuned, "/v2/chat/completions", state="poet") == expected
    assert generate(tuned, "/v2/chat/completions", state="poet", pad_zero=True) != expected
    assert generate(tuned, "/big_batch/completions", state="poet") == expected
    assert generate(tuned, "/state/chat/completions", state="poet", session_id="s") == expected
    assert generate(tuned, "/multi_state/chat/completions", state="poet", session_id="m", dialogue_idx=0) == expected
    raw = {**PLAIN, "prompt": PROMPT, "alpha_presence": 0, "alpha_frequency": 0}
    plainly = {"alpha_presence": 0, "alpha_frequency": 0}
    completion = tuned.post("/openai/v1/completions", {**raw, "model": "rwkv7:poet"})
    assert text_of(completion) == generate(tuned, state="poet", **plainly)
    chat = {"messages": [{"role": "user", "content": "hi"}], **PLAIN}
    parsed = [tuned.post("/openai/v1/chat/completions", {**chat, "state": name}) for name in ("poet", None)]
    assert text_of(parsed[0]) != text_of(parsed[1])
    gap = {**PLAIN, "prefix": ["a"], "suffix": ["b"]}
    filled = [text_of(tuned.post("/FIM/v1/batch-FIM", {**gap, "state": name})) for name in ("poet", None)]
    assert filled[0] != filled[1]
    body = {"source_lang": "en", "target_lang": "de", "text_list": ["Good morning"]}
    translated = [
        tuned.post("/translate/v1/batch-translate", {**body, "state": n}).json() for n in (None, "poet", None)
    ]
    assert translated[0] == translated[2] != translated[1]
    assert plain == generate(tuned)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"state": "nobody"}),
        ("/v1/chat/completions", {"model": "rwkv7:nobody"}),
        ("/state/chat/completions", {"state": "nobody", "session_id": "x"}),
    ],
)
def test_an_unknown_state_is_404(tuned: Service, path: str, fields: dict[str, str]) -> None:
    answer = tuned.post(path, {**PLAIN, "contents": [PROMPT], "stream": False, **fields})
    assert answer.status_code == 404
    assert (answer.json()["field"], answer.json()["given"]) == ("state", "nobody")
    assert "'poet'" in answer.json()["error"]


def test_loaded_by_path_and_removed(tuned: Service) -> None:
    body = {"name": "clerk", "file": "clerk.pth"}
    assert tuned.post("/v1/states", body).status_code == 401
    added = tuned.post("/v1/states", body, headers=ADMIN)
    assert added.status_code == 200 and added.json()["name"] == "clerk" and added.json()["is_kept"]
    assert generate(tuned, state="clerk") not in (generate(tuned), generate(tuned, state="poet"))
    again = tuned.post("/v1/states", {**body, "password": "the boss"})
    assert again.status_code == 409 and "already" in again.json()["error"]
    path = "/v1/states/clerk"
    assert tuned.request("DELETE", path).status_code == 401
    assert tuned.request("DELETE", path, headers=ADMIN).json()["name"] == "clerk"
    assert tuned.request("DELETE", path, headers=ADMIN).status_code == 404
    assert "clerk" not in names(tuned)


def test_sent_as_a_form(tuned: Service, tmp_path: Path) -> None:
    file = write_state(tmp_path / "mine.safetensors", state_of(3).half())
    content, before = file.read_bytes(), generate(tuned)
    for orientation in ("auto", "value_key"):
        sent = tuned.request(
            "POST",
            "/v1/states",
            data={"name": f"mine-{orientation}", "orientation": orientation},
            files={"upload": ("mine.safetensors", content)},
            headers=ADMIN,
        )
        assert sent.status_code == 200, sent.text
        assert sent.json()["orientation"] == {"auto": "key_value"}.get(orientation, orientation)
    texts = {generate(tuned, state=f"mine-{orientation}") for orientation in ("auto", "value_key")}
    assert len(texts | {before}) == 3
    for orientation in ("auto", "value_key"):
        tuned.request("DELETE", f"/v1/states/mine-{orientation}", headers=ADMIN).raise_for_status()


@pytest.mark.parametrize("files", [{}, {"a": ("a", b"1"), "b": ("b", b"2")}, {"a": ("a.pth", b"nonsense")}])
def test_a_form_without_one_good_file(tuned: Service, files: dict[str, Any]) -> None:
    options = {"data": {"name": "bad"}, "headers": ADMIN}
    options |= {"files": files} if files else {"files": {"name": (None, "bad")}, "data": {}}
    answer = tuned.request("POST", "/v1/states", **options)
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"] in ("content", "file")
    assert "bad" not in names(tuned)


@pytest.mark.parametrize("file", ["../poet.pth", "/etc/passwd", "no.pth", ""])
def test_a_path_outside_the_folder_is_refused(tuned: Service, file: str) -> None:
    answer = tuned.post("/v1/states", {"name": "bad", "file": file}, headers=ADMIN)
    assert answer.status_code == 422 and answer.json()["field"] == "file"


def test_mixtures(tuned: Service) -> None:
    duo = [{"name": "poet", "weight": 2}, {"weight": 1}]
    expected = generate(tuned, states=duo)
    assert expected == generate(tuned, states=[{"name": "poet", "weight": 4}, {"name": "", "weight": 2}])
    assert generate(tuned, states=[{"name": "poet"}]) == generate(tuned, state="poet")
    assert generate(tuned, "/v2/chat/completions", states=duo) == expected
    body = {**PLAIN, "contents": [PROMPT] * 2, "states": duo, "stream": True}
    assert row_texts(sse_data(tuned.post("/v1/chat/completions", body).text)) == {0: expected, 1: expected}
    named = tuned.post("/v1/states", {"name": "duo", "states": duo}, headers=ADMIN)
    assert named.status_code == 200 and named.json()["mixture"] == [duo[0], {"name": "", "weight": 1}]
    assert generate(tuned, state="duo") == generate(tuned, model="rwkv7:duo") == expected
    tuned.request("DELETE", "/v1/states/duo", headers=ADMIN).raise_for_status()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"states": [{"name": "poet", "weight": 1}, {"weight": -1}]}, "more than 0"),
        ({"states": [{"name": "poet"}] * 17}, "16"),
        ({"states": [{"name": "poet"}], "state": "poet"}, "together"),
        ({"states": [{"name": "poet", "weight": "x"}]}, "number"),
    ],
)
def test_invalid_mixtures(tuned: Service, fields: dict[str, Any], why: str) -> None:
    answer = tuned.post("/v1/chat/completions", {**PLAIN, "contents": [PROMPT], **fields})
    assert answer.status_code == 422 and why in answer.json()["error"]
    assert answer.json()["field"].startswith("states")


def test_default_decode_parameters_of_a_state(tuned: Service) -> None:
    body = {"contents": [PROMPT], "stop_tokens": [], "ignore_eos": True, "stream": False}
    defaults = {"temperature": 0, "max_tokens": 8, "alpha_presence": 0.5}
    duo = [{"name": "poet", "weight": 2}, {}]
    for added in ({"file": "clerk.pth"}, {"states": duo}):
        sent = tuned.post("/v1/states", {"name": "mild", "defaults": defaults, **added}, headers=ADMIN)
        assert sent.status_code == 200 and sent.json()["defaults"] == defaults
        (prompt_functions,) = [one for one in tuned.get("/v1/states").json()["data"] if one["name"] == "mild"]
        assert prompt_functions["defaults"] == defaults
        for path in ("/v1/chat/completions", "/v2/chat/completions"):
            own = defaults if path.startswith("/v1") else {"temperature": 0, "max_tokens": 8}
            expected = text_of(tuned.post(path, {**body, **own, "state": "mild"}))
            assert text_of(tuned.post(path, {**body, "model": "rwkv7:mild"})) == expected
        shorter = text_of(tuned.post("/v1/chat/completions", {**body, "state": "mild", "max_tokens": 3}))
        assert len(shorter) < len(text_of(tuned.post("/v1/chat/completions", {**body, "state": "mild"})))
        tuned.request("DELETE", "/v1/states/mild", headers=ADMIN).raise_for_status()


@pytest.mark.parametrize(
    ("defaults", "field"),
    [({"temperature": -1}, "defaults.temperature"), ({"max_tokens": 2**40}, "defaults.max_tokens")],
)
def test_invalid_default_decode_parameters(tuned: Service, defaults: dict[str, Any], field: str) -> None:
    answer = tuned.post("/v1/states", {"name": "bad", "file": "clerk.pth", "defaults": defaults}, headers=ADMIN)
    assert answer.status_code == 422 and answer.json()["field"] == field, answer.text
