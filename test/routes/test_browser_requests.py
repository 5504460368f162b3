"""Requests that a browser sends for a page: of this service, of another site, of a rebound name, and of a plugin."""

from __future__ import annotations

from typing import Any

import pytest

from programs.settings import SettingsError, parse_settings
from routes.config import HttpConfig
from routes.serving.browser import BrowserRules
from routes.table import ROUTES
from rwkv_batch.errors import ErrorKind, ServiceError
from test.serving import Service

CHAT = "/v1/chat/completions"
LIST, DELETE, EXPORT = "/state/status", "/state/delete", "/state/export"
TRANSLATE = "/translate/v1/batch-translate"
TEXTS = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello"]}
JSON, SIMPLE = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
FOREIGN, PLUGIN = "https://evil.example", "chrome-extension://bpoadfkcbjbfhfodiogcnhhhpibjhbnh"
CORS = "access-control-allow-origin"


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://localhost:1", PLUGIN, "http://["])
@pytest.mark.parametrize("path", [LIST, DELETE, CHAT])
def test_a_page_of_another_site_is_refused(fake: Service, path: str, origin: str) -> None:
    """`text/plain` needs no preflight, so the browser sends it at once."""
    body = {"session_id": "x", "contents": ["a"]}
    for headers in (SIMPLE, JSON, {}):
        answer = fake.post(path, body, headers={**headers, "Origin": origin})
        assert answer.status_code == 403
        assert "--cors-origin" in answer.json()["error"]
        assert CORS not in answer.headers
    preflight = fake.request("OPTIONS", path, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert CORS not in preflight.headers


def test_a_rebound_name_is_refused(fake: Service) -> None:
    """evil.example may resolve to 127.0.0.1. Its page then has the same origin as the service."""
    for name in ("evil.example", f"evil.example:{fake.port}", "127.0.0.1.evil.example"):
        headers = {**JSON, "Host": name, "Origin": f"http://{name}", "Sec-Fetch-Site": "same-origin"}
        for answer in (fake.post(LIST, {}, headers=headers), fake.request("GET", "/status", headers=headers)):
            assert answer.status_code == 403
            assert "--allowed-hosts" in answer.json()["error"]
        assert fake.request("GET", "/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.8.9.1:1", "[::1]:8000", "a.localhost"])
def test_names_of_loopback_are_allowed(fake: Service, name: str) -> None:
    headers = {**JSON, "Host": name, "Origin": f"http://{name.lower()}"}
    assert fake.post(LIST, {}, headers=headers).status_code == 200


def test_the_own_page_sends_json(fake: Service) -> None:
    own = {"Origin": fake.url, "Sec-Fetch-Site": "same-origin"}
    assert fake.post(LIST, {}, headers={**own, **JSON}).status_code == 200
    with_charset = {"Origin": fake.url, "Content-Type": "application/json; charset=utf-8"}
    assert fake.post(LIST, {}, headers=with_charset).status_code == 200
    for kind in ({}, SIMPLE, {"Content-Type": "application/x-www-form-urlencoded"}):
        answer = fake.post(LIST, {}, headers={**own, **kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]
    query = {"session_id": "x"}
    answer = fake.post("/state/import", content=b"x", params=query, headers={**own, **SIMPLE})
    assert answer.status_code == 415 and "application/octet-stream" in answer.json()["error"]


def test_programs_may_send_any_content_type(fake: Service) -> None:
    """`curl -d` sends a form's type."""
    for kind in ({}, SIMPLE, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert fake.post(LIST, {}, headers=kind).status_code == 200


def test_another_page_may_link_to_the_service_but_not_load_it(fake: Service) -> None:
    for path in ("/status", f"{EXPORT}?session_id=x"):
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        assert fake.request("GET", path, headers=image).status_code == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert fake.request("GET", "/status", headers=link).status_code == 200
    assert fake.request("GET", "/", headers={**link, "Sec-Fetch-Mode": "no-cors"}).status_code == 200


def test_a_plugin_translates_without_a_password(fake: Service) -> None:
    """Immersive Translate sends from its background or from the translated page."""
    for origin in (PLUGIN, "moz-extension://6a0b", FOREIGN):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = fake.request("OPTIONS", TRANSLATE, headers=headers)
        assert (preflight.status_code, preflight.headers[CORS]) == (204, "*")
        answer = fake.post(TRANSLATE, TEXTS, headers={**JSON, "Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert (answer.status_code, answer.headers[CORS]) == (200, "*")
        assert fake.post(TRANSLATE, TEXTS, headers={**SIMPLE, "Origin": origin}).status_code == 415


def refusal(config: HttpConfig, path: str, **headers: str) -> ErrorKind | None:
    route = next(one for one in ROUTES if one.path == path and one.method == "POST")
    try:
        BrowserRules(config).check(route, {name.replace("_", "-"): text for name, text in headers.items()}.get)
    except ServiceError as error:
        return error.info.kind
    return None


def allowed(config: HttpConfig, origin: str) -> str:
    return BrowserRules(config).allowed_origin({"origin": origin}.get, allows_any_origin=False)


def test_listed_origins() -> None:
    settings: dict[str, Any] = {"host": "0.0.0.0", "content_type": "application/json"}
    for text, passed in (
        ("https://a.example, HTTP://localhost:3000/", True),
        ("https://b.example", False),
        ("*", True),
    ):
        config = parse_settings(["--host", settings["host"], "--cors-origin", text], {}).http
        for origin in ("https://a.example", "http://localhost:3000"):
            kind = refusal(config, CHAT, host="x", origin=origin, content_type=settings["content_type"])
            assert kind is (None if passed else ErrorKind.FORBIDDEN)
            assert bool(allowed(config, origin)) is passed
        assert refusal(config, TRANSLATE, origin=PLUGIN, content_type=settings["content_type"]) is None
    listed = HttpConfig(cors_origin=("https://a.example",), password="x")
    assert (allowed(listed, "https://a.example"), allowed(listed, FOREIGN)) == ("https://a.example", "")


def test_with_a_secret_the_secret_decides() -> None:
    """A browser never sends it by itself."""
    for config in (HttpConfig(password="x"), HttpConfig(keys_file="x")):
        headers = {"host": "rwkv.example", "origin": FOREIGN, "content_type": "application/json"}
        assert refusal(config, CHAT, **headers) is None
        assert allowed(config, FOREIGN) == "*"
    assert refusal(HttpConfig(admin_password="x"), CHAT, host="localhost", origin=FOREIGN) is ErrorKind.FORBIDDEN


def test_allowed_hosts() -> None:
    config = parse_settings(["--host", "0.0.0.0", "--password", "x", "--allowed-hosts", "Api.example, *.b.example"], {})
    for name in ("api.example", "API.example:80", "api.example.", "x.b.example", "localhost:1", "[::1]", ""):
        assert refusal(config.http, CHAT, host=name) is None, name
    for name in ("b.example", "evil.example", "api.example.evil", "10.0.0.1", "[2001:db8::1]:80"):
        assert refusal(config.http, CHAT, host=name) is ErrorKind.FORBIDDEN, name
    assert refusal(HttpConfig(host="0.0.0.0"), CHAT, host="any.example") is None
    assert refusal(HttpConfig(host="::1"), CHAT, host="any.example") is ErrorKind.FORBIDDEN
    for address in ("192.168.1.4:8000", "0.0.0.0", "[2001:db8::1]:80"):  # through a port mapping
        assert refusal(HttpConfig(host="::1"), CHAT, host=address) is None, address
    assert refusal(HttpConfig(host="::1", allowed_hosts=("*",)), CHAT, host="any.example") is None


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--cors-origin", "a.example"),
        ("--cors-origin", "https://a.example/path"),
        ("--allowed-hosts", "a.example:80"),
        ("--allowed-hosts", "https://a.example"),
        ("--allowed-hosts", "a.*"),
    ],
)
def test_other_values_are_refused(flag: str, text: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        parse_settings([flag, text], {})
