"""Several engine processes behind one service: streams outlive the engine that began them."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.serving import Service, row_texts, sse_data, wait_for

CHAT = "/v1/chat/completions"
TOKENS = 200
_turns = itertools.count()


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    arguments = ("--model-path", str(tiny_model), "--replicas", "2", "--threads", "1", "--engine-wait-s", "60")
    running = Service(tmp_path_factory.mktemp("pair"), *arguments, "--admin-password", "boss")
    try:
        yield all_ready(running)
    finally:
        running.close()


def all_ready(service: Service) -> Service:
    """Every engine takes work, as every HTTP worker sees it."""
    looks = range(8)
    service.wait(lambda: all(service.get("/readyz").json() == {"status": "ready"} for _ in looks), 60)
    return service


def engines(service: Service) -> dict[str, dict[str, Any]]:
    """What /status says of each engine."""
    return {one["engine"]: one for one in service.status()["engines"]}


def body(number: int, **fields: Any) -> dict[str, Any]:
    """A stream: greedy ones, sampled ones with penalties, and several rows, by turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "seed": number, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": number, "contents": [f"a {number}", f"b {number}"]},
    ]
    return {
        "contents": [f"Stream {number} says"],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stop_tokens": [],
        "stream": True,
        "chunk_size": 2,
        **kinds[number % len(kinds)],
        **fields,
    }


def texts(service: Service, bodies: list[dict[str, Any]], path: str = CHAT) -> list[dict[int, str]]:
    """The text of each row of each stream, all at once; no stream may tell of an error."""

    def one(asked: dict[str, Any]) -> dict[int, str]:
        with service.stream(path, asked) as answer:
            said = "".join(answer.iter_text())
        assert answer.status_code == 200, said
        assert '"error"' not in said, said[-400:]
        return row_texts(sse_data(said))

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(one, bodies))


@pytest.fixture(scope="module")
def undisturbed(pair: Service) -> list[dict[int, str]]:
    found = texts(pair, [body(number) for number in range(12)])
    assert all(found) and len(found) == 12
    return found


class Meanwhile(threading.Thread):
    """Streams under way while something happens to the engines."""

    def __init__(self, service: Service, bodies: list[dict[str, Any]], path: str = CHAT) -> None:
        super().__init__(daemon=True)
        self._service, self._bodies, self._path = service, bodies, path
        self.texts: list[dict[int, str]] = []
        self.start()

    def run(self) -> None:
        self.texts = texts(self._service, self._bodies, self._path)

    def result(self) -> list[dict[int, str]]:
        self.join(90)
        assert not self.is_alive(), "a stream waits for ever"
        return self.texts


def running(service: Service, rows: int = 8) -> None:
    """Until some rows have begun on every engine that is there."""
    wait_for(lambda: sum(one["rows"] for one in engines(service).values()) >= rows, 30, "rows run")


def test_both_engines_get_work(pair: Service) -> None:
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    wait_for(lambda: all(one["rows"] for one in engines(pair).values()), 30, "both have rows")
    streams.result()
    status = pair.status()
    assert [one["status"] for one in status["engines"]] == ["ready", "ready"]
    assert len({one["pid"] for one in status["engines"]}) == 2 and status["running_rows"] == 0
    metrics = pair.get("/metrics").text
    for name in ("engine-0", "engine-1"):
        assert f'rwkv_running_rows{{engine="{name}"}} 0.0' in metrics
    assert metrics.count("# TYPE rwkv_running_rows gauge") == 1 and "rwkv_jobs_refused_total{engine=" not in metrics


@pytest.mark.parametrize("victims", [["engine-0"], ["engine-1"], ["engine-0", "engine-1"]], ids=["one", "other", "all"])
def test_streams_outlive_killed_engines(pair: Service, undisturbed: list[dict[int, str]], victims: list[str]) -> None:
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    running(pair)
    for name in victims:
        os.kill(engines(pair)[name]["pid"], signal.SIGKILL)
    assert streams.result() == undisturbed
    all_ready(pair)


def test_an_engine_that_stands_still_is_lost_and_what_it_says_later_is_not_heard(
    pair: Service, undisturbed: list[dict[int, str]]
) -> None:
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    running(pair)
    still = engines(pair)["engine-0"]["pid"]
    os.kill(still, signal.SIGSTOP)
    try:
        wait_for(lambda: pair.get("/readyz").json() == {"status": "degraded", "lost": ["engine-0"]}, 20, "it is lost")
        assert streams.result() == undisturbed
        assert pair.post(CHAT, {"contents": ["a"], "max_tokens": 1}).status_code == 200
        assert engines(pair)["engine-0"]["status"] == "lost"
    finally:
        os.kill(still, signal.SIGCONT)
    all_ready(pair)
    assert engines(pair)["engine-0"]["pid"] == still
    pair.wait_idle()


def test_a_turn_outlives_its_engine_and_is_taken_once(pair: Service) -> None:
    name = f"turn-{next(_turns)}"
    asked = body(0, contents=["My name is Ada."], session_id=name)
    alone = {**asked, "session_id": f"{name}-alone"}
    (expected,) = texts(pair, [alone], "/state/chat/completions")
    stream = Meanwhile(pair, [asked], "/state/chat/completions")
    running(pair, 1)
    for one in engines(pair).values():
        if one["rows"]:
            os.kill(one["pid"], signal.SIGKILL)
    assert stream.result() == [expected]
    all_ready(pair)
    following = [{**body(0, contents=["And then?"]), "session_id": one} for one in (name, f"{name}-alone")]
    assert len({str(text) for text in texts(pair, following, "/state/chat/completions")}) == 1


def test_random_kills_leave_no_gap_and_no_double(pair: Service, undisturbed: list[dict[int, str]]) -> None:
    rng = random.Random(7)
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    running(pair)
    wait_for(lambda: rng.random() < 0.2, 30, "a moment")
    os.kill(rng.choice([one["pid"] for one in engines(pair).values()]), signal.SIGKILL)
    assert streams.result() == undisturbed
    all_ready(pair)
