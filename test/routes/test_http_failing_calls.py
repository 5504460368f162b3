"""A call of a service fails: what was acknowledged stays, errors are described, the next request works."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.random_weights import write_random_model
from test.conftest import IS_LONG
from test.failing_calls import FILES, MEMORY, SOCKETS, FailingCalls, environment
from test.serving import Service, children, wait_for
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TURN = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
PROMPT = {**TURN, "contents": ["User: one"]}
LINES = 50
ENDED = ("completed", "failed", "expired", "cancelled")
PASSING = (400,)
"""The rest of a body did not come."""
MORE_DESCRIPTORS = 12
"""Pools that fill on first use and connections that are about to close; a leak of one per try is more."""


def numbers(sample: tuple[int, ...], end: int, step: int = 1) -> tuple[int, ...]:
    """Return the numbers of the calls that fail: a sample, or all before `end` in the long tests."""
    return tuple(range(1, end, step)) if IS_LONG else sample


class FailingService:
    def __init__(self, service: Service, calls: FailingCalls, data: Path) -> None:
        self.service = service
        self.calls = calls
        self.data = data
        self.refused = 0
        self.undeleted = 0
        """temporary files whose removal may have failed; a later start removes them"""

    def succeeds(self, send: Callable[[], httpx.Response], *others: int) -> httpx.Response | None:
        """Return the answer of a request that succeeds; None if it fails with a described error or is cut off.

        `others`: further statuses that are right
        """
        try:
            answer = send()
        except httpx.TransportError:
            self.refused += 1
            return None
        if answer.status_code == 200:
            return answer
        if answer.status_code not in others:
            error = answer.json()["error"]
            text = error if isinstance(error, str) else error["message"]
            assert (answer.status_code >= 500 or answer.status_code in PASSING) and len(text) > 20, answer.text
            assert str(self.data) not in text, "clients do not learn paths"
            self.refused += 1
        return None

    def post(self, path: str, body: Any, *others: int) -> httpx.Response | None:
        return self.succeeds(lambda: self.service.post(path, body), *others)

    def turn(self, session: str, **fields: Any) -> httpx.Response | None:
        return self.post("/state/chat/completions", {**PROMPT, "session_id": session, **fields}, 404)

    def export(self, session: str) -> httpx.Response | None:
        return self.succeeds(lambda: self.service.get("/state/export", params={"session_id": session}), 404)

    def generate(self, **fields: Any) -> None:
        answer = self.service.post(CHAT, {**PROMPT, **fields})
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def failing(self, number: int, count: int = 2, kinds: int = FILES) -> Iterator[None]:
        """Let `count` calls fail meanwhile, the first of them with this number."""
        self.calls.arm(number, count, kinds)
        try:
            yield
        finally:
            self.undeleted += count if self.calls.last == "unlink" else 0
            self.calls.disarm()

    def num_descriptors(self) -> int:
        found, number = [self.service.process.pid], 0
        while found:
            pid = found.pop()
            with contextlib.suppress(OSError):
                found += children(pid)
                number += len(os.listdir(f"/proc/{pid}/fd"))
        return number

    def temporary_files(self) -> list[str]:
        """Return files that no list names, or that are being written. The former belong to uploads and batches."""
        listed = {file["id"] for file in self.service.get("/openai/v1/files").json()["data"]}
        files = [path for path in self.data.rglob("*") if path.is_file()]
        kept = [path for path in files if path.parent.name in ("content", "runs") and path.name not in listed]
        unfinished = [path for path in files if path.suffix in (".half", ".new") or path.name.startswith(".")]
        return [str(path) for path in kept + unfinished]


@pytest.fixture(scope="module")
def failing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingService]:
    """A service whose file calls in its data folder can fail. Its calls on sockets and memory can fail too."""
    work = tmp_path_factory.mktemp("work")
    data, models = work / "data", work / "data" / "models"
    models.mkdir(parents=True)
    write_random_model(models / "small.safetensors", layers=1, width=64)
    write_state(models / "clerk.pth", random_state(2, layers=2, width=64))
    flags = ("--l1-sessions=2", "--l2-sessions=2", f"--model-path={tiny_model}", f"--models-dir={models}")
    with Service(data, *flags, **environment(data, work)) as service:
        yield FailingService(service, FailingCalls(work / "control"), data)


def check_nothing_leaks(failing: FailingService, descriptors: int) -> None:
    failing.service.wait_idle()
    left = failing.temporary_files()
    wait_for(lambda: len(failing.temporary_files()) <= failing.undeleted, 30, f"temporary files are deleted: {left}")
    maximum = descriptors + MORE_DESCRIPTORS
    wait_for(
        lambda: failing.num_descriptors() <= maximum, 30, f"{failing.num_descriptors()} descriptors of {maximum} close"
    )


def test_a_failed_file_call_loses_no_turn(failing: FailingService) -> None:
    acknowledged: list[str] = []
    refused = failing.refused
    for number in numbers((1, 3, 6, 10, 15, 21, 28, 36, 45, 60), 120):
        names = [f"n{number}", f"n{number}-other", *acknowledged[:1]]
        with failing.failing(number):
            acknowledged += [name for name in names if failing.turn(name)]
            failing.export(names[0])
        assert all(failing.export(name) for name in acknowledged)
        assert failing.turn(names[0])
        acknowledged.append(names[0])
    assert failing.service.status()["pool"]["quarantined_count"] == 0
    assert failing.service.wait_idle()
    assert failing.refused > refused, "the calls that failed were not those of a turn"


def batch_lines(number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
    lines = [{"custom_id": f"{number}-{i}", "method": "POST", "url": CHAT, "body": body} for i in range(LINES)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def run_batch(failing: FailingService, number: int) -> None:
    """Upload lines, answer them and delete the files. What was acknowledged is there, each line once."""
    service, content = failing.service, batch_lines(number)
    files = {"file": ("lines.jsonl", content)}

    def upload() -> httpx.Response:
        return httpx.post(f"{service.url}/openai/v1/files", data={"purpose": "batch"}, files=files, timeout=60)

    uploaded = failing.succeeds(upload)
    if uploaded is None:
        return
    file = uploaded.json()["id"]
    made = failing.post("/openai/v1/batches", {"input_file_id": file, "endpoint": CHAT})
    if made is not None:
        path = f"/openai/v1/batches/{made.json()['id']}"

        def ended() -> Any:
            answer = failing.succeeds(lambda: service.get(path))
            return answer is not None and answer.json()["status"] in ENDED and answer.json()

        batch = wait_for(ended, 60, "the batch ends")
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] == LINES, batch
        failing.calls.disarm()
        output = batch["output_file_id"]
        answers = service.get(f"/openai/v1/files/{output}/content").text.splitlines()
        answered = sorted(json.loads(line)["custom_id"] for line in answers)
        assert answered == sorted(f"{number}-{i}" for i in range(LINES))
        assert service.request("DELETE", f"/openai/v1/files/{output}").status_code == 200
    failing.calls.disarm()
    assert service.get(f"/openai/v1/files/{file}/content").content == content
    assert service.request("DELETE", f"/openai/v1/files/{file}").status_code == 200


def test_a_batch_is_answered_once_though_file_calls_fail(failing: FailingService) -> None:
    run_batch(failing, 0)
    descriptors, refused = failing.num_descriptors(), failing.refused
    for number in numbers((5, 35, 80, 140), 400, 3):
        with failing.failing(number):
            run_batch(failing, number)
        run_batch(failing, 10_000 + number)
    assert failing.refused > refused or IS_LONG
    check_nothing_leaks(failing, descriptors)


def use_model(failing: FailingService, name: str) -> bool:
    """Load, use and unload a model. Return whether it was ready."""
    body = {"file": "small.safetensors", "name": name, "wait_s": 100}
    loaded = failing.post("/v1/models/load", body, 422)
    if loaded is None:
        return False
    if loaded.json()["status"] != "ready":
        assert len(loaded.json()["error"]) > 20, loaded.text
    else:
        failing.post(CHAT, {**PROMPT, "model": name})
    is_ready: bool = loaded.json()["status"] == "ready"
    unloaded = failing.post("/v1/models/unload", {"name": name, "wait_s": 100})
    return is_ready and unloaded is not None


def test_a_model_loads_after_file_calls_failed(failing: FailingService) -> None:
    assert use_model(failing, "first")
    descriptors = failing.num_descriptors()
    for number in numbers((1, 4), 40):
        with failing.failing(number):
            use_model(failing, f"model-{number}")
        names = [model["id"] for model in failing.service.get("/v1/models").json()["data"]]
        if f"model-{number}" in names:  # its removal failed, or this worker does not know of it yet
            failing.post("/v1/models/unload", {"name": f"model-{number}", "wait_s": 100}, 404)
        assert use_model(failing, f"model-{number}")
        failing.generate()
    check_nothing_leaks(failing, descriptors)


def state_names(failing: FailingService) -> list[str]:
    return [entry["name"] for entry in failing.service.get("/v1/states").json()["data"]]


def use_state(failing: FailingService, name: str, content: bytes | None) -> None:
    """Load a tuned state, use it and remove it. It is uploaded or loaded by its path. A session uses it too."""
    service = failing.service

    def add() -> httpx.Response:
        if content is None:
            return service.post("/v1/states", {"name": name, "file": "clerk.pth"})
        files = {"content": ("mine.pth", content)}
        return httpx.post(f"{service.url}/v1/states", data={"name": name}, files=files, timeout=60)

    added = failing.succeeds(add, 422)
    failing.post(CHAT, {**PROMPT, "state": name}, 404)
    session = {"session_id": f"of {name}"}
    turn = failing.post("/state/chat/completions", {**PROMPT, "state": name, **session}, 404)
    failing.calls.disarm()
    assert (name in state_names(failing)) >= (added is not None), "it was acknowledged and is lost"
    if added is not None:
        failing.generate(state=name)
    if turn is not None:
        assert service.post("/state/chat/completions", {**PROMPT, **session}).status_code == 200


def remove_state(failing: FailingService, name: str) -> None:
    removed = failing.succeeds(lambda: failing.service.request("DELETE", f"/v1/states/{name}"), 404)
    assert removed is None or name not in state_names(failing)


def test_a_tuned_state_is_kept_though_file_calls_fail(failing: FailingService) -> None:
    content = (failing.data / "models" / "clerk.pth").read_bytes()
    use_state(failing, "first", content)
    descriptors = failing.num_descriptors()
    for number in numbers((1, 4, 9, 16, 25), 80):
        name = f"state-{number}"
        with failing.failing(number):
            use_state(failing, name, content if number % 2 else None)
        with failing.failing(1 + number // 8):
            remove_state(failing, name)
        if name in state_names(failing):
            remove_state(failing, name)
        use_state(failing, name, content)
        remove_state(failing, name)
        assert name not in state_names(failing)
    check_nothing_leaks(failing, descriptors)


@pytest.mark.parametrize("kinds", [SOCKETS, MEMORY], ids=["sockets", "memory"])
def test_a_failed_call_of_a_socket_or_of_memory_loses_nothing(failing: FailingService, kinds: int) -> None:
    """The request that it hits may fail or be cut off. An engine without memory may start again."""
    service = failing.service
    long = {"contents": ["User: " + "one two three " * 20_000]}
    failing.generate()
    descriptors = failing.num_descriptors()
    for number in numbers((1, 2, 3, 5, 9, 17), 60):
        names = [f"{kinds}-{number}-{i}" for i in range(3)]
        with failing.failing(number, 1, kinds):
            acknowledged = [name for i, name in enumerate(names) if failing.turn(name, **({} if i else long))]
            exported = failing.export(names[0])
            if exported is not None:
                address = f"{service.url}/state/import?session_id=copy-{kinds}-{number}"
                failing.succeeds(partial(httpx.post, address, content=exported.content, timeout=60))
        wait_for(lambda: service.get("/readyz").status_code == 200, 60, "an engine that ended is there again")
        assert all(failing.export(name) for name in acknowledged)
        failing.generate()
    check_nothing_leaks(failing, descriptors)
