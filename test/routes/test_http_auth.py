"""The password: required on all routes except the public ones, before any other check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import openai
import pytest

from test.routes.conftest import openai_client
from test.routes.test_openai_routes import chat
from test.serving import Service

CHAT = "/v1/chat/completions"
SECRET = "pass wörd"
BOSS = "the boss"
STATE = {"file": "x.pth"}
"""Without a name: refused with 422 where the password is right."""
BODY = {"contents": ["a"], "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("locked")
    secret = folder / "password"
    secret.write_text(f"{SECRET}\nnot this line\n")
    arguments = (
        "--password-file",
        str(secret),
        "--http-workers",
        "1",
        "--admin-password",
        BOSS,
        "--log-format",
        "json",
    )
    with Service(folder, *arguments, program="test/fake_app.py", PYTHONPATH=".", RWKV_MODEL_NAME="locked") as running:
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A password from the environment, one sampler, and a short queue."""
    flags = ("--model-path", str(tiny_model), "--http-workers", "1", "--samplers", "naive", "--max-waiting-rows", "8")
    with Service(tmp_path_factory.mktemp("plain"), *flags, RWKV_PASSWORD="s3cret") as running:
        running.headers = {"Authorization": "Bearer s3cret"}
        yield running


def test_password_in_the_body(locked: Service) -> None:
    assert locked.post(CHAT, {**BODY, "password": SECRET}).status_code == 200
    headers = {"Authorization": f"Bearer {quote(SECRET)}"}
    assert locked.post(CHAT, {**BODY, "password": None}, headers=headers).status_code == 200, "null is no password"


def test_a_non_ascii_password_is_percent_encoded(locked: Service) -> None:
    for token, status in ((SECRET, 200), (SECRET[:-1], 401)):
        headers = {"Authorization": f"Bearer {quote(token)}"}
        assert locked.request("GET", "/status", headers=headers).status_code == status


@pytest.mark.parametrize("wrong", ["", "pass", SECRET + " ", 7, None, [SECRET]])
def test_a_wrong_password_is_401(locked: Service, wrong: object) -> None:
    answer = locked.post(CHAT, {**BODY, "password": wrong})
    assert answer.status_code == 401
    assert answer.json()["error"] == "Unauthorized: invalid or missing password or key"
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("header", ["Bearer nope", "Bearer", "Basic cGFzcw==", "nope"])
def test_a_wrong_header_is_401(locked: Service, header: str) -> None:
    assert locked.post(CHAT, BODY, headers={"Authorization": header}).status_code == 401


def test_the_password_comes_before_validation(locked: Service) -> None:
    assert locked.post(CHAT, {"contents": 7}).status_code == 401
    assert locked.post(CHAT, content=b"{").status_code == 401
    assert locked.post(CHAT, {"contents": 7, "password": SECRET}).status_code == 422


def test_a_body_of_a_stranger_is_read_up_to_64_kib(locked: Service) -> None:
    """A larger one needs the password as a header. The header decides before the body is read."""
    small, large = ({**BODY, "contents": ["a" * size], "password": SECRET} for size in (60_000, 70_000))
    assert locked.post(CHAT, small).status_code == 200
    refused = locked.post(CHAT, large)
    assert refused.status_code == 401 and "Authorization: Bearer" in refused.json()["error"]
    assert locked.post(CHAT, large, headers={"Authorization": f"Bearer {quote(SECRET)}"}).status_code == 200
    for limit_mb in (20, 50):  # also above --max-body-mb
        assert locked.post(CHAT, content=b"[" + b"1," * (limit_mb << 19)).status_code == 401


def test_the_number_of_values_is_limited_by_the_token_limit(locked: Service) -> None:
    headers = {"Authorization": f"Bearer {quote(SECRET)}"}
    values = b",".join([b"1"] * 1_200_000)
    refused = locked.post("/openai/v1/completions", content=b'{"prompt": [' + values + b"]}", headers=headers)
    assert refused.status_code == 413 and "values in lists" in refused.json()["error"]["message"]


def test_public_and_protected_paths(locked: Service) -> None:
    assert locked.get("/healthz").status_code == 200
    assert locked.get("/health").status_code == 200
    assert locked.get("/readyz").status_code == 200  # a load balancer has no password
    for path in ("/status", "/metrics", "/v1/models", "/openapi.json"):
        assert locked.get(path).status_code == 401
    assert locked.request("OPTIONS", CHAT).status_code == 204


def test_pages_of_every_origin_may_use_the_password(locked: Service) -> None:
    """A browser never sends it by itself."""
    headers = {"Origin": "https://a.example", "Content-Type": "application/json"}
    answers = [
        locked.request("GET", "/healthz", headers=headers),
        locked.request("GET", "/nowhere", headers=headers),
        locked.request("GET", CHAT, headers=headers),
        locked.request("OPTIONS", CHAT, headers=headers),
        locked.post(CHAT, {}, headers=headers),
        *(
            locked.post(CHAT, body, headers={**headers, "Authorization": f"Bearer {quote(SECRET)}"})
            for body in ({}, BODY, {**BODY, "stream": True})
        ),
    ]
    assert [answer.status_code for answer in answers] == [200, 404, 405, 204, 401, 422, 200, 200]
    assert all(answer.headers["access-control-allow-origin"] == "*" for answer in answers)


def test_the_log_does_not_show_the_password(locked: Service) -> None:
    locked.post(CHAT, {**BODY, "password": SECRET, "temperature": -1})
    assert SECRET not in locked.log.read_text()
    assert '"level":"info"' in locked.log.read_text()


@pytest.mark.slow
def test_bearer_token(plain: Service) -> None:
    assert plain.post(CHAT, BODY).status_code == 200
    assert plain.get("/v1/models").status_code == 200
    assert plain.post(CHAT, BODY, headers={"Authorization": "bearer s3cret"}).status_code == 200
    assert plain.post(CHAT, BODY, headers={"Authorization": "Bearer s3cre"}).status_code == 401
    assert plain.get("/status", params={"password": "s3cret"}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/openai/v1", "/v1"])
def test_openais_package_knows_a_wrong_password_and_a_full_queue(plain: Service, prefix: str) -> None:
    with openai_client(plain, prefix, "wrong") as unauthorized:
        for refused in (lambda one: chat(one), lambda one: one.models.list()):
            with pytest.raises(openai.AuthenticationError) as refusal:
                refused(unauthorized)
            assert refusal.value.code == "invalid_api_key"
    with openai_client(plain, prefix, "s3cret") as authorized:
        assert chat(authorized).choices
        with pytest.raises(openai.RateLimitError) as full:
            authorized.completions.create(model="rwkv7", prompt="a", n=64)
        assert int(full.value.response.headers["retry-after"]) >= 1


SAMPLING = {
    "/v1/chat/completions": {"contents": ["a"]},
    "/v2/chat/completions": {"contents": ["a"]},
    "/big_batch/completions": {"contents": ["a"], "stream": False},
    "/FIM/v1/batch-FIM": {"prefix": ["a"], "suffix": ["b"]},
    "/state/chat/completions": {"contents": ["a"], "session_id": "s"},
    "/multi_state/chat/completions": {"contents": ["a"], "session_id": "m"},
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/openai/v1/completions": {"prompt": "a"},
}


@pytest.mark.slow
def test_every_route_uses_the_configured_sampler(plain: Service) -> None:
    """`--samplers` takes precedence over a route's preferred sampler."""
    for path, body in SAMPLING.items():
        assert plain.post(path, {"max_tokens": 2, **body}).status_code == 200, path
    assert plain.status()["samplers"]["used"] == {"default": "naive", "flashinfer": "naive"}


def test_routes_that_change_the_service_require_the_admin_password(locked: Service) -> None:
    for secret, status in ((SECRET, 401), ("", 401), (BOSS, 422)):
        assert locked.post("/v1/states", {**STATE, "password": secret}).status_code == status
    both = {"Authorization": f"Bearer {quote(SECRET)}"}
    assert "admin password" in locked.post("/v1/states", STATE, headers=both).json()["error"]
    assert locked.post("/v1/states", {**STATE, "password": BOSS}, headers=both).status_code == 422
    assert locked.request("GET", "/metrics", headers=both).status_code == 401
    assert "processes" not in locked.request("GET", "/status", headers=both).json()
    headers = {"Authorization": f"Bearer {BOSS}"}
    assert locked.post("/v1/states", STATE, headers=headers).status_code == 422
    assert locked.request("GET", "/status", headers=headers).status_code == 200
    assert locked.post(CHAT, {**BODY, "password": BOSS}).status_code == 200
