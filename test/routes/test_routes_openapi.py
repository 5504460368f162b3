"""The OpenAPI document and the API reference: complete, correct for random input, and up to date.

RWKV_LONG_TESTS=1 tries 200 valid and 200 invalid inputs per route instead of 2 and 1.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck

from routes.docs.openapi import openapi_document
from routes.docs.reference import SERVER, answer_schemas, markdown, sections
from routes.reference import API_PAGE
from routes.response.http_response import HTTP_STATUS
from routes.table import ROUTES
from rwkv_batch.errors import ErrorKind
from test.conftest import IS_LONG
from test.routes.test_translation_memory import TMX
from test.serving import Service

pytestmark = pytest.mark.slow

DOCUMENT = openapi_document(ROUTES)
MOST_TOKENS, MOST_ROWS = 3, 4
NO_LIMIT = (-1, -2)
"""Values of llama.cpp's n_predict: until the context is full."""
ANSWER_404 = (
    "POST /state/delete", "POST /openai/v1/embeddings", "POST /v1/states", "DELETE /v1/states/{name}",
    "POST /v1/adapters", "DELETE /v1/adapters/{name}", "POST /v1/engines/add", "POST /v1/engines/remove",
    "POST /v1/models/load", "POST /v1/models/unload", "GET /openai/v1/files/{file_id}",
    "DELETE /openai/v1/files/{file_id}", "POST /openai/v1/batches", "GET /openai/v1/batches/{batch_id}",
    "POST /openai/v1/batches/{batch_id}", "POST /loadmodel", "POST /removemodel", "POST /loadstatemodel",
    "POST /api/push", "POST /api/create", "POST /api/copy", "POST /api/embed", "POST /api/embeddings",
    *(f"{method} {path}/glossaries/{{glossary_id}}" for method in ("GET", "DELETE", "PUT", "PATCH")
      for path in ("/translate/v1", "/v2", "/v3")),
    "POST /suggest", "POST /openai/v1/fine_tuning/jobs", "DELETE /openai/v1/models/{model}",
    *(f"{method} /openai/v1/fine_tuning/jobs/{{job_id}}" for method in ("GET", "POST")),
    *(f"{method} /translate/v1/documents/{{document_id}}" for method in ("GET", "DELETE")),
    "POST /v2/document/{document_id}", "GET /download_file/{document_id}",
    "DELETE /api/delete", "POST /mrss_loadstatemodel", "POST /mrss_set_gatingweight",
)  # fmt: skip
"""Routes whose examples need something that is missing: an object, a file, or several engines."""
EXAMPLES = 200 if IS_LONG else 2
OWN_ROUTES = {
    (one.method, one.handle, one.body, one.query, id(one.conversation_route)): one for one in reversed(ROUTES)
}
"""Routes without those that are another name of an earlier one."""
INPUTS = [
    (f"{one.method} {one.path}", mode)
    for one in OWN_ROUTES.values()
    for mode in ("POSITIVE", "NEGATIVE")
    if mode == "POSITIVE" or "requestBody" in DOCUMENT["paths"][one.path][one.method.lower()]
]


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    import schemathesis  # takes a second, which other workers of pytest need not spend

    return {one.ok().label: one.ok() for one in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()}


def made_short(body: Any) -> Any:
    """Return a body with little work. Invalid values stay invalid. A translation may time out with 504."""
    if not isinstance(body, dict):
        return body
    short = {name: value for name, value in body.items() if name != "timeout_s"}
    short.setdefault("n_predict", MOST_TOKENS)  # llama.cpp's
    if short["n_predict"] is None or short["n_predict"] in NO_LIMIT:
        short["n_predict"] = MOST_TOKENS
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        value = short.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > MOST_TOKENS:
            short[name] = MOST_TOKENS
    rows = short.get("n")
    if isinstance(rows, int) and not isinstance(rows, bool) and rows > MOST_ROWS:
        short["n"] = MOST_ROWS
    if "max_tokens" not in short:
        short["max_tokens"] = MOST_TOKENS
    if isinstance(short.get("options", {}), dict):  # Ollama's
        short["options"] = {"num_predict": MOST_TOKENS, **short.get("options", {})}
    return short


@pytest.mark.parametrize(("label", "mode"), INPUTS)
def test_random_input_is_answered_as_documented(
    service: Service, operations: dict[str, Any], label: str, mode: str
) -> None:
    from schemathesis import GenerationMode
    from schemathesis import checks as known
    from schemathesis.specs.openapi import checks

    wanted = [known.not_a_server_error, checks.status_code_conformance]
    wanted += [checks.content_type_conformance, checks.response_schema_conformance]

    @hypothesis.given(case=operations[label].as_strategy(generation_mode=GenerationMode[mode]))
    @hypothesis.settings(
        max_examples=EXAMPLES if mode == "POSITIVE" or IS_LONG else 1,  # test_generated_bodies.py sends a thousand
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        case.body = made_short(case.body)
        case.call_and_validate(base_url=service.url, checks=wanted, timeout=150)

    run()


def test_the_service_returns_the_same_document(service: Service) -> None:
    assert service.get("/openapi.json").json() == DOCUMENT


def test_every_route_is_described() -> None:
    operations = {(method.upper(), path) for path, one in DOCUMENT["paths"].items() for method in one}
    assert operations == {(route.method, route.path) for route in ROUTES}


def test_every_field_has_its_default_its_limits_and_a_meaning() -> None:
    for section in sections(DOCUMENT):
        for name, _, default, _, meaning in section.rows:
            assert default.strip("`") and meaning, f"{section.title}: {name}"
    for shape in answer_schemas(DOCUMENT):
        assert shape.text
        assert all(kind for _, kind, _ in shape.rows), shape.title
    limits = {name: limits for name, _, _, limits, _ in sections(DOCUMENT)[0].rows}
    assert limits["`temperature`"] == "≥ 0, ≤ 100"
    assert limits["`stop_tokens`"] == "≤ 64 entries"
    assert limits["`session_id`"] == "≥ 1 characters, ≤ 256 characters"


def test_the_reference_is_up_to_date() -> None:
    assert API_PAGE.read_text(encoding="utf-8") == markdown(DOCUMENT), "run: python -m routes.reference"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"contents": ["a"]}}
    (made / "memory.tmx").write_text(TMX, "utf-8")
    (made / "lines.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    (made / "film.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n", "utf-8")
    return made


@pytest.mark.parametrize("section", sections(DOCUMENT), ids=lambda section: section.title)
def test_every_curl_command_works(service: Service, folder: Path, section: Any) -> None:
    command = shlex.split(section.curl.replace(SERVER, service.url))
    ran = subprocess.run(
        [*command, "-sS", "-m", "150", "-w", "\n%{http_code}"], capture_output=True, text=True, check=True, cwd=folder
    )
    status = ran.stdout.splitlines()[-1]
    assert status in ("200", "201", "204") or (section.title in ANSWER_404 and status != "405"), ran.stdout


class Links(HTMLParser):
    """The URLs that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(values.get("src") or values.get("href") or tag)


def test_docs_need_no_network(service: Service) -> None:
    answer = service.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    links = Links()
    links.feed(answer.text)
    assert links.loaded == []
    assert "url(" not in answer.text
    assert "<strong>Models.</strong> <code>model</code> names" in answer.text and "`" not in answer.text
    for route in ROUTES:
        assert f"<summary>{route.method} {route.path}</summary>" in answer.text


def test_every_error_kind_has_a_status() -> None:
    assert set(HTTP_STATUS) == set(ErrorKind)
