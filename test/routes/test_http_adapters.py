"""Adapters over HTTP, from the demo: on any route, several per batch, listed, loaded, removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from demo import files
from test.adapter_files import write_adapter
from test.serving import Service, row_texts, sse_data

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not files.MODEL.is_file(), reason="no trained model in this tree")]
TUNED = files.MODEL.parent / "tuned"
ADMIN = {"Authorization": "Bearer the boss"}
GREEDY = {"max_tokens": 16, "temperature": 0, "stop_tokens": [0, "\n"]}
TO_FRENCH = "English: Thank you very much.\n\nFrench:"
TO_SPANISH = "English: Thank you very much.\n\nSpanish:"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "models").mkdir()
    shutil.copy(TUNED / "spanish.safetensors", folder / "models")
    (folder / "models" / "broken.pth").write_bytes(b"nothing")
    width = load_file(TUNED / "spanish.safetensors")["blocks.0.att.key.lora_A"].shape[1]
    router = {"blocks.0.ffn.router.linear.weight": torch.ones(3, width)}
    write_adapter(folder / "models" / "router.pth", router)
    write_adapter(folder / "models" / "endless.pth", {**router, "moe_info": torch.tensor([4, torch.inf])})
    write_adapter(folder / "models" / "empty.pth", {"blocks.0.att.key.disha": torch.ones(0, width)})
    torch.save({1: torch.ones(3)}, folder / "models" / "numbered.pth")
    arguments = ("--adapter-serve", f"french={TUNED / 'french.safetensors'}:1", "--state", f"json={TUNED / 'json.pth'}")
    arguments += ("--models-dir", str(folder / "models"), "--admin-password", "the boss", "--http-workers", "1")
    with Service(folder, *arguments) as running:
        body = {"name": "spanish", "file": "spanish.safetensors", "scale": 1}
        assert running.post("/v1/adapters", body).status_code == 401
        assert running.post("/v1/adapters", body, headers=ADMIN).status_code == 200
        yield running


def texts(service: Service, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
    answer = service.post(path, {**GREEDY, "contents": [TO_FRENCH], "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [(one["text"] if "text" in one else one["message"]["content"]).strip() for one in choices]


def test_every_way_to_name_an_adapter(served: Service) -> None:
    plain = texts(served)
    assert plain != ["Merci beaucoup."]
    for fields in ({"adapter": "french"}, {"model": "rwkv7+french"}, {"model": "rwkv7+french", "adapter": "french"}):
        assert texts(served, **fields) == ["Merci beaucoup."]
    assert texts(served, adapter="") == texts(served, adapter=None) == plain
    assert texts(served, contents=[TO_SPANISH], adapter="spanish") == ["Muchas gracias."]
    for model in ("rwkv7+french:json", "rwkv7+french json"):
        expected = texts(served, adapter="french", state="json")
        assert texts(served, model=model) == expected != ["Merci beaucoup."]


def test_every_route_accepts_an_adapter(served: Service) -> None:
    for path in ("/v2/chat/completions", "/big_batch/completions"):
        assert texts(served, path, adapter="french") == ["Merci beaucoup."]
    for path, more in (("state", {}), ("multi_state", {"dialogue_idx": 0})):
        fields = {"adapter": "french", "session_id": path, **more}
        assert texts(served, f"/{path}/chat/completions", **fields) == ["Merci beaucoup."]
    raw = {**GREEDY, "prompt": TO_FRENCH, "pad_zero": False}
    answers = [
        served.post("/openai/v1/completions", {**raw, "model": model}).json() for model in ("rwkv7+french", "rwkv7")
    ]
    assert answers[0]["choices"][0]["text"].strip() == "Merci beaucoup."
    french, plain = (answer["system_fingerprint"] for answer in answers)
    assert french.startswith(f"{plain}+")
    body = {"source_lang": "English", "target_lang": "French", "text_list": ["Thank you very much."]}
    translated = [
        served.post("/translate/v1/batch-translate", {**body, "adapter": name}).json()["translations"][0]["text"]
        for name in ("french", None, "french")
    ]
    assert translated[0] == translated[2] == "Merci beaucoup." != translated[1]
    scored = {"contents": [TO_FRENCH], "candidates": [" Merci beaucoup.", " Thank you."]}
    found = [served.post("/v1/score", {**scored, "adapter": name}).json() for name in ("french", None)]
    assert found[0] != found[1]


def test_different_adapters_in_one_batch(served: Service) -> None:
    """Three kinds of requests at the same time. Each stream is the same as alone."""
    expected = {"french": " Merci beaucoup.", "spanish": " Muchas gracias."}
    body = {**GREEDY, "contents": [TO_FRENCH, TO_SPANISH] * 8, "stream": True}
    alone = {
        name: row_texts(sse_data(served.post("/v1/chat/completions", {**body, "adapter": name}).text))
        for name in expected
    }
    for name, text in expected.items():
        assert set(alone[name].values()) >= {text}


def test_adapters_are_listed(served: Service) -> None:
    prompt_functions = {entry["name"]: entry for entry in served.get("/v1/adapters").json()["data"]}
    assert list(prompt_functions) == ["french", "spanish"] and prompt_functions["french"]["rank"] == 16
    assert prompt_functions["spanish"]["models"] == ["rwkv7+spanish"] and prompt_functions["spanish"]["scale"] == 1.0
    for path in ("/v1/models", "/openai/v1/models"):
        assert {"rwkv7", "rwkv7+french", "rwkv7+spanish"} <= {model["id"] for model in served.get(path).json()["data"]}
    assert served.get("/openai/v1/models/rwkv7+french").json()["id"] == "rwkv7+french"


WRONG: list[tuple[dict[str, str], int, str, str]] = [
    ({"adapter": "german"}, 404, "adapter", "'french', 'spanish'"),
    ({"model": "rwkv7+german"}, 404, "adapter", "no adapter 'german'"),
    ({"model": "rwkv7+french", "adapter": "spanish"}, 422, "adapter", "another one"),
]


@pytest.mark.parametrize(("fields", "status", "field", "why"), WRONG)
def test_unknown_names(served: Service, fields: dict[str, str], status: int, field: str, why: str) -> None:
    answer = served.post("/v1/chat/completions", {**GREEDY, "contents": ["a"], **fields})
    assert (answer.status_code, answer.json()["field"]) == (status, field) and why in answer.json()["error"]
    assert status != 404 or answer.json()["given"] == "german"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "french", "file": "spanish.safetensors", "scale": 1}, 409),
        ({"name": "new", "file": "broken.pth", "scale": 1}, 422),
        ({"name": "new", "file": "../models/../../etc/passwd", "scale": 1}, 422),
        ({"name": "new", "file": "spanish.safetensors"}, 422),
        ({"name": "new", "file": "router.pth", "scale": 1}, 422),
        ({"name": "new", "file": "endless.pth", "scale": 1}, 422),
        ({"name": "new", "file": "empty.pth", "scale": 1}, 422),
        ({"name": "new", "file": "numbered.pth", "scale": 1}, 422),
        ({"name": "new"}, 422),
    ],
)
def test_files_that_cannot_be_loaded(served: Service, body: dict[str, Any], status: int) -> None:
    answer = served.post("/v1/adapters", body, headers=ADMIN)
    received = answer.json()
    assert answer.status_code == status and received["given"] == body.get(received["field"])
    prompt_functions = {one["name"]: one["file"] for one in served.get("/v1/adapters").json()["data"]}
    assert prompt_functions == {"french": str(TUNED / "french.safetensors"), "spanish": "spanish.safetensors"}
    assert texts(served, adapter="french") == ["Merci beaucoup."]


def test_an_adapter_is_uploaded_in_a_form(served: Service) -> None:
    """Its file is kept under the session database, and removed with it."""
    folder = served.state_db.with_name(f"{served.state_db.name}.files") / "adapters"
    content = (TUNED / "french.safetensors").read_bytes()
    for wrong in (b"nothing", content[:-9]):
        sent = {"data": {"name": "up", "scale": "1"}, "files": {"content": ("f.safetensors", wrong)}, "headers": ADMIN}
        refused = served.request("POST", "/v1/adapters", **sent)
        assert refused.status_code == 422 and refused.json()["error"].startswith("content: the uploaded file "), (
            refused.text
        )
        assert str(folder) not in refused.text and not list(folder.glob("published-*")), refused.text
    sent["files"] = {"content": ("../f.pth", content)}
    assert served.request("POST", "/v1/adapters", **{**sent, "headers": {}}).status_code == 401
    added = served.request("POST", "/v1/adapters", **sent)
    assert (
        added.status_code == 200
        and "warnings" not in added.json()
        and len(list(folder.glob("published-*.safetensors"))) == 1
    ), added.text
    assert texts(served, adapter="up") == texts(served, adapter="french")
    assert served.request("DELETE", "/v1/adapters/up", headers=ADMIN).status_code == 200
    assert not list(folder.glob("published-*"))


def test_a_removed_adapter_is_unknown(served: Service) -> None:
    body = {"name": "for a while", "file": "spanish.safetensors", "scale": 1}
    assert served.post("/v1/adapters", body, headers=ADMIN).status_code == 422
    body["name"] = "while"
    assert served.post("/v1/adapters", body, headers=ADMIN).status_code == 200
    assert texts(served, contents=[TO_SPANISH], adapter="while") == ["Muchas gracias."]
    assert served.request("DELETE", "/v1/adapters/while").status_code == 401
    assert served.request("DELETE", "/v1/adapters/while", headers=ADMIN).json()["name"] == "while"
    assert served.request("DELETE", "/v1/adapters/while", headers=ADMIN).status_code == 404
    assert served.post("/v1/chat/completions", {**GREEDY, "contents": ["a"], "adapter": "while"}).status_code == 404
