"""Several engine processes behind one service: streams outlive the engine that began them."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.conftest import IS_LONG
from test.ray_nodes import descendants
from test.serving import START_TIMEOUT_S, Service, children, raise_priority, row_texts, sse_data, wait_for

CHAT, STATE = "/v1/chat/completions", "/state/chat/completions"
ADMIN = {"Authorization": "Bearer boss"}
TOKENS = 200


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    arguments = ("--model-path", str(tiny_model), "--replicas", "2", "--threads", "1", "--engine-wait-s", "300")
    running = Service(tmp_path_factory.mktemp("pair"), *arguments, "--admin-password", "boss")
    running.headers = ADMIN  # the engines stand in the whole status only
    try:
        yield all_ready(running)
    finally:
        running.close()


def all_ready(service: Service) -> Service:
    """Wait until every engine accepts work in every HTTP worker. A connection reaches one worker by chance."""

    def are_ready() -> bool:
        raise_priority(descendants(os.getpid()))  # other tests starve an engine that loads at low priority
        return all(service.get("/readyz").json() == {"status": "ready"} for _ in range(12))

    service.wait(are_ready, START_TIMEOUT_S)
    return service


def engines(service: Service) -> dict[str, dict[str, Any]]:
    return {one["engine"]: one for one in service.status()["engines"]}


def pid_of(service: Service, engine: str) -> int:
    """The engine's process. A worker learns a restarted process's pid shortly after it connects."""
    pid: int = wait_for(lambda: engines(service)[engine]["pid"], 30, f"{engine} has a process")
    return pid


def body(number: int, **fields: Any) -> dict[str, Any]:
    """A stream by number: greedy, sampled with penalties, or with several rows."""
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


def texts(
    service: Service, bodies: list[dict[str, Any]], path: str = CHAT, begins: Callable[[], None] = lambda: None
) -> list[dict[int, str]]:
    """The text of each row of concurrent streams. No stream may report an error. `begins` is set at the first text."""

    def one(asked: dict[str, Any]) -> dict[int, str]:
        with service.stream(path, asked) as answer:
            pieces = answer.iter_text()
            said = next(pieces)
            begins()
            said += "".join(pieces)
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


class Meanwhile:
    """Streams that run during an operation on the engines."""

    def __init__(self, service: Service, bodies: list[dict[str, Any]], path: str = CHAT) -> None:
        self._begun = threading.Semaphore(0)
        self._texts = ThreadPoolExecutor(1).submit(texts, service, bodies, path, self._begun.release)

    def wait_begun(self) -> None:
        """Wait until six streams have begun.

        The streams report it themselves, because they may end before a status call.
        """
        for _ in range(6):
            assert self._begun.acquire(timeout=120), "no stream begins"

    def result(self) -> list[dict[int, str]]:
        """Wait for the texts. Raises what a stream raised."""

        def have_ended() -> bool:
            raise_priority(descendants(os.getpid()))  # as in `all_ready`
            return self._texts.done()

        wait_for(have_ended, 125, "the streams end")
        return self._texts.result()


def generated(service: Service) -> dict[str, float]:
    """Return the tokens that each engine has sent."""
    found = re.findall(
        r'^rwkv_completion_tokens_total\{engine="(.*)"\} (.*)$', service.get("/metrics").text, re.MULTILINE
    )
    return {engine: float(count) for engine, count in found}


def test_both_engines_get_jobs(pair: Service) -> None:
    before = generated(pair)
    texts(pair, [body(number) for number in range(12)])
    assert all(after > before[name] for name, after in generated(pair).items())
    status = pair.wait_idle()
    assert [one["status"] for one in status["engines"]] == ["ready", "ready"]
    assert len({one["pid"] for one in status["engines"]}) == 2 and status["running_rows"] == 0
    metrics = pair.get("/metrics").text
    for name in ("engine-0", "engine-1"):
        assert f'rwkv_running_rows{{engine="{name}"}} 0.0' in metrics
    assert metrics.count("# TYPE rwkv_running_rows gauge") == 1 and "rwkv_jobs_refused_total{engine=" not in metrics


@pytest.mark.parametrize("victims", [["engine-1"], ["engine-0", "engine-1"]] if IS_LONG else [["engine-0", "engine-1"]])
def test_streams_and_turns_outlive_killed_engines(
    pair: Service, undisturbed: list[dict[int, str]], victims: list[str]
) -> None:
    name = f"turn-{len(victims)}"
    turn = body(0, contents=["My name is Ada."], session_id=name)
    (expected,) = texts(pair, [{**turn, "session_id": f"{name}-alone"}], STATE)
    pids = [pid_of(pair, victim) for victim in victims]
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    turns = Meanwhile(pair, [turn], STATE)
    streams.wait_begun()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert streams.result() == undisturbed
    assert turns.result() == [expected]
    following = [{**body(0, contents=["And then?"]), "session_id": one} for one in (name, f"{name}-alone")]
    assert len({str(text) for text in texts(pair, following, STATE)}) == 1, "the turn ran twice, or not at all"
    all_ready(pair)


def test_a_suspended_engine_is_lost_and_its_later_events_are_ignored(
    pair: Service, undisturbed: list[dict[int, str]]
) -> None:
    still = pid_of(pair, "engine-0")
    streams = Meanwhile(pair, [body(number) for number in range(12)])
    streams.wait_begun()
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


def test_no_request_fails_while_all_engines_restart(pair: Service, undisturbed: list[dict[int, str]]) -> None:
    before = {one["pid"] for one in engines(pair).values()}
    asked = {"engine": "all", "wait_s": 300}
    with ThreadPoolExecutor(1) as thread:
        restart = thread.submit(pair.post, "/v1/engines/restart", asked, headers=ADMIN, timeout=330)
        rounds = 0
        while not restart.done() or not rounds:
            assert texts(pair, [body(number) for number in range(6)]) == undisturbed[:6]
            servers = children(pair.process.pid)  # engines are forked from one
            raise_priority(one for server in servers for one in children(server))  # the streams starve a loading one
            rounds += 1
    assert not before & {one["pid"] for one in restart.result().json()["data"]}
    all_ready(pair)
    stranger = pair.post("/v1/engines/restart", {"engine": "engine-0"}, headers={"Authorization": "Bearer -"})
    assert stranger.status_code == 401


def test_engines_are_added_and_removed_while_others_serve(pair: Service) -> None:
    name = "guest"
    texts(pair, [body(0, contents=["My name is Ada."], session_id=name)], STATE)
    streams = Meanwhile(pair, [body(number) for number in range(6)])
    added = pair.post("/v1/engines/add", {"wait_s": 300}, headers=ADMIN, timeout=330).json()["data"]
    assert [(one["id"], one["status"]) for one in added] == [(f"engine-{n}", "ready") for n in range(3)]
    removed = pair.post("/v1/engines/remove", {"engine": "engine-0", "wait_s": 300}, headers=ADMIN, timeout=330)
    assert [one["id"] for one in removed.json()["data"]] == ["engine-1", "engine-2"]
    assert len(streams.result()) == 6
    assert texts(pair, [body(0, contents=["And then?"], session_id=name)], STATE)
    unknown = pair.post("/v1/engines/remove", {"engine": "engine-0"}, headers=ADMIN)
    assert unknown.status_code == 422 and "engine-1, engine-2" in unknown.json()["error"]
    assert (unknown.json()["field"], unknown.json()["given"]) == ("engine", "engine-0")
    all_ready(pair)


def test_concurrent_turns_of_a_session_run_one_after_the_other(pair: Service) -> None:
    """Connections reach HTTP workers by chance. Each worker routes on its own."""
    short = {"max_tokens": 8, "temperature": 0, "session_id": "shared", "ignore_eos": True, "stop_tokens": []}
    with ThreadPoolExecutor(6) as threads:
        asked = [{**short, "contents": [f"Turn {number}."]} for number in range(6)]
        answers = list(threads.map(lambda one: pair.post(STATE, one), asked))
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
    before = pair.post(STATE, {**short, "contents": ["Once more."]}).json()["usage"]["prompt_tokens"]
    assert before >= 6 * 8
    assert pair.post("/state/delete", {"session_id": "shared"}).status_code == 200
    after = pair.post(STATE, {**short, "contents": ["Once more."]}).json()["usage"]["prompt_tokens"]
    assert after < 8
