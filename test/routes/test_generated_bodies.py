"""Invalid bodies from a random seed, based on every route's example.

No answer is a 5xx, each error names its field, and other clients notice nothing. RWKV_LONG_TESTS=1 sends 20,000 instead
of 1,000. A failure names the seed of its body.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from routes.route import Route
from routes.table import ROUTES
from test.serving import Service

pytestmark = pytest.mark.slow

BODIES = 20_000 if os.environ.get("RWKV_LONG_TESTS") else 1000
WANT_FILES = (
    "/v1/states", "/openai/v1/files", "/openai/v1/batches", "/v1/models/load", "/v1/adapters",
    "/v1/engines/add", "/v1/engines/remove", "/v1/engines/restart", "/suggest", "/translate/v1/documents",
    "/openai/v1/fine_tuning/jobs", "/loadmodel", "/loadstatemodel", "/mrss_loadstatemodel",
)  # fmt: skip
TAKES_BODY = [
    route for route in ROUTES if route.body is not None and route.method == "POST" and route.path not in WANT_FILES
]
"""All routes except those whose example names a missing file or engine, and the one that stops the engine."""
NEIGHBOUR = {"contents": ["The cat", "猫"], "max_tokens": 12, "seed": 3, "ignore_eos": True, "stop_tokens": []}
CHAT = "/v1/chat/completions"
REFUSALS = {400, 404, 409, 413, 422, 429}
RELATED = {
    "contents": {"messages", "prefix", "suffix", "session_id", "text"},
    "prefix": {"suffix"},
    "messages": {"contents"},
    "prompt": {"suffix", "echo", "session_id"},
    "n": {"prompt"},
    "text": {"contents", "messages"},
    "top_logprobs": {"logprobs"},
    "echo": {"logprobs", "session_id", "suffix"},
    "best_of": {"n", "stream"},
    "max_tokens": {"session_id"},
    "candidates": {"contents"},
    "file": {"name", "states", "content", "orientation", "stream", "max_tokens", "password"},
    "states": {"state", "session_id"},
    "engine": {"stream", "max_tokens", "password"},
    "devices": {"stream", "max_tokens", "password"},
}
"""Field in an error -> fields whose change may have caused it."""


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def odd_value(dice: random.Random) -> Any:
    """Return a value that hardly any field accepts."""
    plain: list[Any] = [
        None, True, False, -1, 0, 1, 2.5, -2.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), 2**31, 2**53 - 1,
        2**63 - 1, 2**63, 2**64 - 1, 10**30, -(10**30), "", " ", "x",
        "\n\n", "\x00", "é😀", "\ud800", "\udfff a", "x" * 300, "9" * 400,
        "auto", "null", [], {}, [[]], [None], [{}], ["a", 1], [1, "a"], [-1], [2**40], [True], ["\ud800"], ["x" * 400],
        list(range(70)), {"": ""}, {"a": {"b": []}}, {"type": "text"}, {"role": "user"}, nested(20), nested(150),
        nested(400), ["a"] * 5000,
    ]  # fmt: skip
    return copy.deepcopy(dice.choice(plain))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def spoil(dice: random.Random, route: Route, body: dict[str, Any]) -> str:
    """Change one part of a body. Return the changed field."""
    assert route.body is not None
    fields = list(route.body.model_fields)
    if dice.random() < 0.5:
        name = dice.choice(fields)
        body[name] = odd_value(dice)
        return name
    path = dice.choice(list(places(body)))
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    match dice.randrange(4):
        case 0:
            del holder[path[-1]]
        case 1 if isinstance(holder, list):
            holder.append(odd_value(dice))
        case 2 if isinstance(holder, dict):
            holder[dice.choice(["", "x", "\u2028", "\ud83d", *fields])] = odd_value(dice)
            return ""
        case _:
            holder[path[-1]] = odd_value(dice)
    return str(path[0])


def torn(dice: random.Random, text: bytes) -> bytes:
    """Return bytes that are not JSON any more, or other JSON."""
    at = dice.randrange(len(text) + 1)
    match dice.randrange(7):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]
        case 2:
            return (
                text[:at] + dice.choice([b"\xff", b"\xc3", b"\\ud800", b"\\u", b"\x00", b"[" * 300, b'"']) + text[at:]
            )
        case 3:
            return text + dice.choice([b"{}", b",", b"\xef\xbb\xbf", text])
        case 4:
            return dice.choice([b"", b"null", b"[]", b"1", b'"a"', b"\xef\xbb\xbf", b"{}", b"{" * 500, b"NaN", b"-"])
        case 5:
            name = json.dumps(dice.choice(list(json.loads(text)) or ["x"])).encode()
            return text[:-1] + b"," + name + b":" + json.dumps(odd_value(dice)).encode() + b"}"
        case _:
            return b"\xef\xbb\xbf" + text.replace(b":", b":1e999,", 1)


def generated(seed: int) -> tuple[Route, bytes, str]:
    """Return a route, a body and the one spoiled field. The field is "" if it is unknown."""
    dice = random.Random(seed)
    route = dice.choice(TAKES_BODY)
    body = copy.deepcopy(route.example or {})
    body |= {"max_tokens": 2, "stream": dice.random() < 0.3}
    changed = {spoil(dice, route, body) for _ in range(dice.choice([1, 1, 1, 2, 3]))}
    text = json.dumps(body).encode()
    if dice.random() < 0.25:
        return route, torn(dice, text), ""
    return route, text, changed.pop() if len(changed) == 1 else ""


@pytest.fixture(scope="module")
def bounded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with low limits, so that no request takes long."""
    flags = ("--model-path", str(tiny_model), "--http-workers", "1", "--max-tokens-limit", "64")
    with Service(
        tmp_path_factory.mktemp("generated"), *flags, "--default-timeout-s", "60", "--max-timeout-s", "60"
    ) as running:
        yield running


class Neighbour(threading.Thread):
    """Repeats one request and compares its answers."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._over = threading.Event()
        self.expected = self._texts()
        self.num_requests = 0
        self.differs: list[Any] = []

    def _texts(self) -> Any:
        answer = self._service.post(CHAT, NEIGHBOUR)
        return (
            [choice["message"]["content"] for choice in answer.json()["choices"]] if answer.is_success else answer.text
        )

    def run(self) -> None:
        while not self._over.is_set():
            if (texts := self._texts()) != self.expected:
                self.differs.append(texts)
            self.num_requests += 1

    def stop(self) -> None:
        self._over.set()
        self.join(60)


def complaint(route: Route, spoiled: str, answer: httpx.Response) -> str:
    """Return the error in an answer to a spoiled body. It is "" for none."""
    if answer.status_code in (200, 201):
        return ""
    if answer.status_code not in REFUSALS:
        return f"status {answer.status_code}"
    if len(answer.content) > 3000:
        return f"an error of {len(answer.content)} bytes"
    error = answer.json().get("error") or answer.json()["message"]  # DeepL's name
    message, field = (
        (error["message"], error.get("param")) if isinstance(error, dict) else (error, answer.json().get("field"))
    )
    is_of_field = error.get("code") == "invalid_field" if isinstance(error, dict) else answer.status_code == 422
    if is_of_field and not field:
        return "no field"
    top = str(field).partition("[")[0].partition(".")[0]
    if is_of_field and spoiled and top != spoiled and spoiled not in RELATED.get(top, ()):
        return "" if spoiled in message else f"{field} is named, {spoiled} was spoiled"
    return ""


def test_spoiled_bodies_are_refused_without_harm(bounded: Service) -> None:
    neighbour = Neighbour(bounded)
    neighbour.start()
    before = bounded.pids()
    own, clients = threading.local(), contextlib.ExitStack()

    def begin() -> None:  # a connection pool shared by threads may close a connection that another thread has just got
        own.client = clients.enter_context(httpx.Client(base_url=bounded.url, timeout=90))

    def send(seed: int) -> tuple[int, str]:
        route, body, spoiled = generated(seed)
        answer = own.client.post(route.path, content=body)
        wrong = complaint(route, spoiled, answer)
        return (
            answer.status_code,
            f"seed {seed}, {route.path}: {wrong}; {body[:200]!r} -> {answer.text[:300]}" if wrong else "",
        )

    with clients, ThreadPoolExecutor(4, initializer=begin) as pool:
        results = list(pool.map(send, range(BODIES)))
    neighbour.stop()
    wrong = [text for _, text in results if text]
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n".join(wrong[:20])
    statuses = Counter(status for status, _ in results)
    assert statuses[422] > BODIES // 4 and statuses[422] + statuses[400] > 2 * BODIES // 5, statuses
    assert statuses[400] > BODIES // 20 and statuses[200] > BODIES // 20, statuses
    assert neighbour.num_requests > 5 and not neighbour.differs
    assert bounded.pids() == before
    assert "Traceback" not in bounded.log.read_text()
    bounded.wait_idle()
    print(f"{len(results)} bodies: {dict(statuses)}; a neighbour asked {neighbour.num_requests} times")
