"""RWKV-Infer's routes: its README's commands as printed, except for port and password."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from test.model.random_older_weights import random_older_weights
from test.serving import Service
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer the boss"}
MODEL = "RWKV x060 1B6 Base"
FILE = "models/RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth"
BONE = "adapters/rwkv-9-bone.pth"
MIX = ["states/jp7b-bancho.pth", "states/ojousama2.pth", "states/secret.pth"]
PRINTED = "http://127.0.0.1:9000"
POST = f"curl {PRINTED}/%s -X POST -H \"Content-Type: application/json\" -d '%s'"
LOAD = POST % (
    "loadmodel", f'{{"model_filename":"{FILE}","model_viewname":"{MODEL}","model_strategy":"",'
    r'"default_temperature":"1.0", "default_top_p":"0.3", "endtoken":"\\n\\n"}',
)  # fmt: skip
LOAD_WITH_ADAPTER = POST % (
    "loadmodel", f'{{"model_filename":"{FILE}","model_viewname":"{MODEL}","model_strategy":"",'
    f'"adapter_filename":"{BONE}","adapter_mode":"bone",'
    r'"default_temperature":"1.0", "default_top_p":"0.3", "endtoken":"\\n\\n"}',
)  # fmt: skip
ADD_STATE = POST % (
    "loadstatemodel", '{"state_filename":"state.pth","state_viewname":"State Test","default_temperature":"1.0", '
    '"default_top_p":"0.3"}',
)  # fmt: skip
ADD_MIXTURE = POST % (
    "mrss_loadstatemodel", '{"state_viewname":"MRSS Test", '
    '"state_filenames":["states/jp7b-bancho.pth","states/ojousama2.pth","states/secret.pth"], '
    '"contain_originalstate":"True", "state_gatingweight":["0.01","0.3","0.4","0.03"],'
    '"default_temperature":"1.0", "default_top_p":"0.8"}',
)  # fmt: skip
HERE = MODEL.replace(" ", "-")
REMOVE_STATES = POST % ("removestatemodel", '{"dummy":"dummy"}')
NAMES = f"curl {PRINTED}/models -X GET"
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
    for name in ("states", "models", "adapters"):
        (folder / name).mkdir()
    for seed, name in enumerate((*MIX, "state.pth")):
        write_state(folder / name, random_state(seed, layers=2, width=64, scale=2.0))
    torch.save(random_older_weights("6", layers=2, width=64, vocab=65536), folder / FILE)
    torch.save({"blocks.1.ffn.key.bone": torch.randn(8, 8, 8)}, folder / BONE)
    arguments = ("--models-dir", str(folder), "--admin-password", "the boss", "--http-workers", "1")
    with Service(folder, "--model-path", str(tiny_model), *arguments) as running:
        yield running


def route(service: Service, name: str, **body: Any) -> httpx.Response:
    return service.post(f"/{name}", body, headers=ADMIN, timeout=300)


def done(service: Service, name: str, **body: Any) -> None:
    answer = route(service, name, **body)
    assert answer.status_code == 200 and answer.json() == {"status": "success"}, answer.text


def generate(service: Service, model: str, **fields: Any) -> str:
    answer = service.post(CHAT, {**BODY, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def run(service: Service, command: str) -> Any:
    """Run a command as printed, except for address and admin password. Return its answer."""
    words = shlex.split(command.replace(PRINTED, service.url))
    shown = [*words, "-sS", "-H", "Authorization: " + ADMIN["Authorization"]]
    return json.loads(subprocess.run(shown, capture_output=True, check=True, timeout=300).stdout)


def names(service: Service) -> list[str]:
    return [one["id"] for one in service.get("/models").json()]


def states(service: Service) -> dict[str, Any]:
    """The tuned states of the service's own model, by name."""
    return {one["name"]: one for one in service.get("/v1/states").json()["data"]}


@pytest.mark.slow
def test_the_readmes_commands(infer: Service) -> None:
    """In the README's order: a model is loaded twice under one name, then with an adapter."""
    success = {"status": "success"}
    assert run(infer, f"curl {PRINTED}/healthcheck") == {"message": "ok", "status_code": 200}
    assert run(infer, LOAD) == success
    plain = generate(infer, MODEL)
    shown = infer.get(f"/v1/models/{HERE}").json()
    assert shown["defaults"] == {"temperature": 1.0, "top_p": 0.3, "stop_tokens": [0, "\n\n"]}
    listed = infer.request("GET", "/models", headers={"X-Stainless-Lang": "python"}).json()
    assert listed == infer.get("/openai/v1/models").json(), "an OpenAI SDK whose base_url lacks the path"
    answer = route(infer, "loadmodel", model_filename=MIX[0], model_viewname=MODEL)
    assert answer.status_code == 422 and answer.json()["field"] == "model_filename", answer.text
    assert generate(infer, MODEL) == plain, "files are checked before anything is replaced"
    assert run(infer, LOAD_WITH_ADAPTER) == run(infer, ADD_STATE) == run(infer, ADD_MIXTURE) == success
    prompt_functions = [one["id"] for one in run(infer, NAMES)]
    assert {one["object"] for one in run(infer, NAMES)} == {"models"}
    assert prompt_functions[:2] == [HERE, f"{HERE} State-Test"] and prompt_functions[-1] == f"{HERE} MRSS-Test"
    # A request may use the original or the listed names.
    texts = {generate(infer, f"{MODEL}{of}") for of in ("", " State Test", " MRSS Test")}
    assert len(texts) == 3 and texts == {
        generate(infer, name) for name in (prompt_functions[0], prompt_functions[1], prompt_functions[-1])
    }
    assert generate(infer, MODEL) != plain, "it is under the adapter now"
    assert generate(infer, "rwkv7") != generate(infer, MODEL) and not states(
        infer
    )  # the service's own model has none of them
    chat = {"model": f"{MODEL} MRSS Test", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    chat |= {"mrss_gatingweight": ["0.01", "0.01", "0.9", "0.1"], "names": {"user": "user"}}
    assert infer.post("/chat/completions", chat).json()["object"] == "chat.completion"
    assert run(infer, REMOVE_STATES) == success
    assert names(infer) == [HERE]
    answer = infer.post(CHAT, {**BODY, "model": f"{MODEL} State Test"})
    assert answer.status_code == 404 and answer.json()["field"] == "state"
    assert infer.request("POST", "/removemodel", headers=ADMIN).json() == success
    assert infer.post(CHAT, {**BODY, "model": MODEL}).status_code == 404 and names(infer) == ["rwkv7"]
    assert route(infer, "removemodel").status_code == 404  # the service's own model stays


def test_a_mixtures_weights(infer: Service) -> None:
    done(infer, "mrss_loadstatemodel", state_viewname="Duo", state_filenames=MIX[:2], default_top_p=0.5)
    assert [one["weight"] for one in states(infer)["Duo"]["mixture"]] == [1, 1]
    by_request = generate(infer, "rwkv7 Duo", mrss_gatingweight=["1", "0"])
    assert by_request == generate(infer, "rwkv7 Duo.0") != generate(infer, "rwkv7 Duo.1")
    assert generate(infer, "rwkv7", state="Duo", mrss_gatingweight=[0, 1]) == generate(infer, "rwkv7 Duo.1")
    done(infer, "mrss_set_gatingweight", state_viewname="rwkv7 Duo", state_gatingweight=["1", "0"])
    assert generate(infer, "rwkv7 Duo") == by_request and states(infer)["Duo"]["defaults"] == {"top_p": 0.5}
    for weights, model in (([1], "rwkv7 Duo"), ([1, 0], "rwkv7 Duo.0"), ([1, 0], "rwkv7")):
        answer = infer.post(CHAT, {**BODY, "model": model, "mrss_gatingweight": weights})
        assert answer.status_code == 422 and answer.json()["field"] == "mrss_gatingweight", answer.text
    for weights in ([1], [1, -1], ["x", 1]):
        answer = route(infer, "mrss_set_gatingweight", state_viewname="Duo", state_gatingweight=weights)
        assert answer.status_code == 422 and answer.json()["field"].startswith("state_gatingweight"), answer.text
    assert route(infer, "mrss_set_gatingweight", state_viewname="nobody").status_code == 404
    done(infer, "removestatemodel")
    assert not states(infer)


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("loadmodel", {"model_filename": "../x.pth"}, "model_filename"),
        ("loadmodel", {"model_filename": MIX[0], "model_viewname": "broken"}, "model_filename"),
        ("loadmodel", {"model_filename": FILE, "adapter_filename": MIX[0], "adapter_mode": "bone"}, "adapter_filename"),
        ("loadmodel", {"model_filename": "x.pth", "model_strategy": "fp6"}, "model_strategy"),
        ("loadmodel", {"model_filename": "x.pth", "template": "qwen"}, "template"),
        ("loadmodel", {"model_filename": "x.pth", "endtoken": r"\ud800"}, "endtoken"),
        ("loadmodel", {"model_filename": "x.pth", "endtoken": r"\ude00\ud83d"}, "endtoken"),
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
def test_invalid_requests_are_refused_by_name(infer: Service, name: str, body: dict[str, Any], field: str) -> None:
    answer = route(infer, name, **body)
    assert answer.status_code == 422 and answer.json()["field"] == field, answer.text
    assert not states(infer) and names(infer) == ["rwkv7"]


@pytest.mark.parametrize("name", ["loadmodel", "loadstatemodel", "mrss_set_gatingweight", "removemodel"])
def test_the_routes_require_the_administrator(infer: Service, name: str) -> None:
    assert infer.post(f"/{name}", {}).status_code == 401
