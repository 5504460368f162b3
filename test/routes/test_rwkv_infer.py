"""RWKV-Infer's verbs: the commands of its README as printed, but for the files' names and the password."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.serving import Service
from test.state_files import random_state, write_state

ADMIN = {"Authorization": "Bearer the boss"}
MODEL = "RWKV x070 1B6 Base"
MIX = ["states/one.pth", "states/two.pth", "states/three.pth"]
CHAT = "/v1/chat/completions"
BODY = {
    "contents": ["User: hi\n\nAssistant:"],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "stop_tokens": [],
}


@pytest.fixture(scope="module")
def infer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("infer")
    for seed, name in enumerate(("one", "two", "three")):
        (folder / "states").mkdir(exist_ok=True)
        write_state(folder / "states" / f"{name}.pth", random_state(seed, layers=2, width=64, scale=2.0))
    (folder / "models").mkdir()
    shutil.copy(tiny_model, folder / "models")
    arguments = ("--models-dir", str(folder), "--admin-password", "the boss", "--http-workers", "1")
    running = Service(folder, "--model-path", str(tiny_model), *arguments)
    try:
        yield running.wait_ready()
    finally:
        running.close()


def verb(service: Service, name: str, **body: Any) -> httpx.Response:
    return service.post(f"/{name}", body, headers=ADMIN, timeout=300)


def done(service: Service, name: str, **body: Any) -> None:
    answer = verb(service, name, **body)
    assert answer.status_code == 200 and answer.json() == {"status": "success"}, answer.text


def said(service: Service, model: str, **fields: Any) -> str:
    answer = service.post(CHAT, {**BODY, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def names(service: Service) -> list[str]:
    return [one["id"] for one in service.get("/models").json()]


def states(service: Service) -> dict[str, Any]:
    """By name, as /v1/states has those of the service's own model."""
    return {one["name"]: one for one in service.get("/v1/states").json()["data"]}


def test_the_readmes_commands(infer: Service, tiny_model: Path) -> None:
    file = f"models/{tiny_model.name}"
    done(
        infer, "loadmodel", model_filename=file, model_viewname=MODEL, model_strategy="", default_temperature="1.0",
        default_top_p="0.3", endtoken="\\n\\n",
    )  # fmt: skip
    done(
        infer, "loadstatemodel", state_filename=MIX[0], state_viewname="State Test", default_temperature="1.0",
        default_top_p="0.3",
    )  # fmt: skip
    done(
        infer, "mrss_loadstatemodel", state_viewname="MRSS Test", state_filenames=MIX, contain_originalstate="True",
        state_gatingweight=["0.01", "0.3", "0.4", "0.03"], default_temperature="1.0", default_top_p="0.8",
    )  # fmt: skip
    here = MODEL.replace(" ", "-")
    listed = names(infer)
    assert listed[:2] == [here, f"{here} State-Test"] and listed[-1] == f"{here} MRSS-Test"
    assert {one["object"] for one in infer.get("/models").json()} == {"models"}
    told = infer.get(f"/v1/models/{here}").json()
    assert told["defaults"] == {"temperature": 1.0, "top_p": 0.3, "stop_tokens": [0, "\n\n"]}
    # A request may write the names as they were given, or as they are listed.
    texts = {said(infer, f"{MODEL}{of}") for of in ("", " State Test", " MRSS Test")}
    assert len(texts) == 3 and texts == {said(infer, name) for name in (listed[0], listed[1], listed[-1])}
    assert said(infer, "rwkv7") == said(infer, MODEL) and not states(infer)  # the service's own has none of it
    done(infer, "removestatemodel", dummy="dummy")
    assert names(infer) == [here]
    answer = infer.post(CHAT, {**BODY, "model": f"{MODEL} State Test"})
    assert answer.status_code == 404 and answer.json()["field"] == "state"
    assert httpx.post(f"{infer.url}/removemodel", headers=ADMIN, timeout=300).json() == {"status": "success"}
    assert infer.post(CHAT, {**BODY, "model": MODEL}).status_code == 404 and names(infer) == ["rwkv7"]
    assert verb(infer, "removemodel").status_code == 404  # the service's own stays


def test_a_mixtures_weights(infer: Service) -> None:
    done(infer, "mrss_loadstatemodel", state_viewname="Duo", state_filenames=MIX[:2], default_top_p=0.5)
    assert [one["weight"] for one in states(infer)["Duo"]["mixture"]] == [1, 1]
    by_request = said(infer, "rwkv7 Duo", mrss_gatingweight=["1", "0"])
    assert by_request == said(infer, "rwkv7 Duo.0") != said(infer, "rwkv7 Duo.1")
    assert said(infer, "rwkv7", state="Duo", mrss_gatingweight=[0, 1]) == said(infer, "rwkv7 Duo.1")
    done(infer, "mrss_set_gatingweight", state_viewname="rwkv7 Duo", state_gatingweight=["1", "0"])
    assert said(infer, "rwkv7 Duo") == by_request and states(infer)["Duo"]["defaults"] == {"top_p": 0.5}
    for weights, model in (([1], "rwkv7 Duo"), ([1, 0], "rwkv7 Duo.0"), ([1, 0], "rwkv7")):
        answer = infer.post(CHAT, {**BODY, "model": model, "mrss_gatingweight": weights})
        assert answer.status_code == 422 and answer.json()["field"] == "mrss_gatingweight", answer.text
    for weights in ([1], [1, -1], ["x", 1]):
        answer = verb(infer, "mrss_set_gatingweight", state_viewname="Duo", state_gatingweight=weights)
        assert answer.status_code == 422 and answer.json()["field"].startswith("state_gatingweight"), answer.text
    assert verb(infer, "mrss_set_gatingweight", state_viewname="nobody").status_code == 404
    done(infer, "removestatemodel")
    assert not states(infer)


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("loadmodel", {"model_filename": "../x.pth"}, "model_filename"),
        ("loadmodel", {"model_filename": "states/one.pth", "model_viewname": "broken"}, "model_filename"),
        ("loadmodel", {"model_filename": "x.pth", "model_strategy": "fp6"}, "model_strategy"),
        ("loadmodel", {"model_filename": "x.pth", "template": "qwen"}, "template"),
        ("loadmodel", {"model_filename": "x.pth", "adapter_filename": "a", "adapter_mode": "mole"}, "adapter_mode"),
        ("loadmodel", {"model_filename": "x.pth", "default_top_p": "2"}, "default_top_p"),
        ("loadstatemodel", {"state_filename": "/etc/passwd", "state_viewname": "x"}, "state_filename"),
        ("loadstatemodel", {"state_filename": MIX[0], "state_viewname": " "}, "state_viewname"),
        ("mrss_loadstatemodel", {"state_viewname": "x", "state_filenames": [MIX[0], "none.pth"]}, "state_filenames"),
        (
            "mrss_loadstatemodel",
            {"state_viewname": "x", "state_filenames": MIX[:1], "state_gatingweight": ["1", "2"]},
            "state_gatingweight",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(infer: Service, name: str, body: dict[str, Any], field: str) -> None:
    answer = verb(infer, name, **body)
    assert answer.status_code == 422 and answer.json()["field"] == field, answer.text
    assert not states(infer) and names(infer) == ["rwkv7"]


@pytest.mark.parametrize("name", ["loadmodel", "loadstatemodel", "mrss_set_gatingweight", "removemodel"])
def test_the_verbs_want_the_administrator(infer: Service, name: str) -> None:
    assert infer.post(f"/{name}", {}).status_code == 401
