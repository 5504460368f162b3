"""Loading and unloading models while the service runs. Each model has its own engine process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.programs.batch.test_openai_batches import begun, client_of, ended, lines_of
from test.serving import FreshService, Service, children, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
ADMIN = {"Authorization": "Bearer boss"}
WAIT_S = 80
ALL = 16
"""Requests after which every HTTP worker got some; the system assigns them at random."""
WHO: dict[str, Any] = {"contents": ["who"], "max_tokens": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the fake engine accepts as models."""
    path = tmp_path_factory.mktemp("models")
    for name in ("good", "other", "slow", "broken", "dying", "imports"):
        (path / f"{name}.pth").write_bytes(b"x")
    (path / "notes.txt").write_text("no model")
    return path


@pytest.fixture(scope="module")
def fake(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    arguments = ("--models-dir", str(folder), "--admin-password", "boss", "--max-models", "3")
    with FreshService(
        tmp_path_factory.mktemp("service"), *arguments, program="test/fake_app.py", PYTHONPATH="."
    ) as running:
        running.headers = ADMIN  # /status shows models and processes to an administrator
        yield running


def load(service: Service, file: str, name: str) -> dict[str, Any]:
    return changed(service, "load", file=file, name=name)


def unload(service: Service, name: str) -> dict[str, Any]:
    return changed(service, "unload", name=name)


def changed(service: Service, how: str, **body: str) -> dict[str, Any]:
    """Changes a model as the administrator, and waits for it."""
    answer = service.post(f"/v1/models/{how}", {**body, "wait_s": WAIT_S}, headers=ADMIN, timeout=2 * WAIT_S)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def answering_model(service: Service, model: str, path: str = CHAT) -> str:
    body = WHO if path == CHAT else {"prompt": "who", "max_tokens": 1}
    answer = service.post(path, {**body, "model": model})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"]).strip()


def wait_for_all_workers(service: Service, model: str, expected: str | int) -> None:
    """Wait until every HTTP worker has the new state."""

    def ask() -> bool:
        found = [service.post(CHAT, {**WHO, "model": model}) for _ in range(ALL)]
        if isinstance(expected, int):
            return all(answer.status_code == expected for answer in found)
        return all(a.status_code == 200 and expected in a.text for a in found)

    wait_for(ask, 20, f"{model}: {expected}")


def test_a_model_is_loaded_used_listed_and_unloaded(fake: Service) -> None:
    assert load(fake, "good.pth", "small")["status"] == "ready"
    wait_for_all_workers(fake, "small", "small")
    assert (
        answering_model(fake, "rwkv7") == "rwkv7"
        and answering_model(fake, "small", "/openai/v1/completions") == "small"
    )
    listed = {one["id"]: one for one in fake.get("/v1/models").json()["data"]}
    assert listed["small"]["status"] == "ready" and listed["small"]["file"] == "good.pth" and "rwkv7" in listed
    assert unload(fake, "small")["status"] == "unloaded"
    wait_for_all_workers(fake, "small", 404)
    assert "small" not in {one["id"] for one in fake.get("/v1/models").json()["data"]}


def test_each_model_has_its_fingerprint(fake: Service) -> None:
    def fingerprints(model: str) -> set[str]:
        body = {"messages": [{"role": "user", "content": "who"}], "max_tokens": 1, "model": model}
        return {fake.post("/openai" + CHAT, body).json()["system_fingerprint"] for _ in range(ALL)}

    assert fingerprints("rwkv7") == {"fp_rwkv7"}
    load(fake, "good.pth", "small")
    wait_for_all_workers(fake, "small", "small")
    assert fingerprints("small") == {"fp_small"}
    assert fingerprints("rwkv7") == {"fp_rwkv7"}
    unload(fake, "small")


def test_the_status_shows_each_models_settings(fake: Service) -> None:
    body = {"file": "good.pth", "name": "small", "wkv_state": "int8", "dtype": "int4", "wait_s": WAIT_S}
    assert fake.post("/v1/models/load", body, headers=ADMIN, timeout=2 * WAIT_S).json()["status"] == "ready"
    wait_for_all_workers(fake, "small", "small")
    status = fake.get("/status").json()
    assert (status["model"], status["dtype"], status["wkv_state"]) == ("rwkv7", "auto", "auto")
    (small,) = [one for one in status["models"] if one["id"] == "small"]
    assert (small["status"], small["dtype"], small["wkv_state"]) == ("ready", "int4", "int8")
    broken = fake.post("/v1/models/load", {"file": "broken.pth", "name": "broken", "wait_s": WAIT_S}, headers=ADMIN)
    assert broken.json()["status"] == "failed"
    wait_for(lambda: len(fake.get("/status").json()["models"]) == 2, 20, "the table with both")
    unload(fake, "small")
    unload(fake, "broken")


def test_all_processes_are_in_one_session_and_each_in_a_group_of_its_own(fake: Service) -> None:
    """Linux compares priorities within a session only (sched_autogroup).

    Ctrl-C signals a process group.
    """
    load(fake, "good.pth", "near")
    processes = {*_engines(fake), *fake.pids().values()}
    assert len(_engines(fake)) == 2 and len(processes) >= 4
    assert {os.getsid(pid) for pid in processes} == {os.getsid(fake.process.pid)}
    assert {os.getpgid(pid) for pid in processes} == processes
    unload(fake, "near")


def test_unloading_without_wait_returns_its_status(fake: Service) -> None:
    load(fake, "good.pth", "going")
    answer = fake.post("/v1/models/unload", {"name": "going"}, headers=ADMIN)
    assert answer.json()["status"] in ("unloading", "unloaded")
    wait_for_all_workers(fake, "going", 404)


def test_an_unknown_name_is_404_with_the_list(fake: Service) -> None:
    answer = fake.post(CHAT, {**WHO, "model": "gpt-9"})
    assert answer.status_code == 404 and "'rwkv7'" in answer.json()["error"] and answer.json()["field"] == "model"
    answer = fake.post("/openai/v1/completions", {"prompt": "who", "model": "gpt-9"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["broken", "dying"])
def test_a_failed_load_gives_a_reason_and_harms_nothing(fake: Service, name: str) -> None:
    reported = load(fake, f"{name}.pth", name)
    assert reported["status"] == "failed" and (
        "is not a model; give another `file`" in reported["error"] or "exit code 3" in reported["error"]
    )
    wait_for_all_workers(fake, name, 404)
    assert reported["error"] in fake.post(CHAT, {**WHO, "model": name}).json()["error"]
    assert (
        fake.get(f"/v1/models/{name}").json()["error"] == reported["error"]
        and answering_model(fake, "rwkv7") == "rwkv7"
    )
    assert load(fake, "good.pth", name)["status"] == "ready"  # another file may take the name
    assert unload(fake, name)["status"] == "unloaded"


def test_an_engine_that_is_forked_imports_nothing_more(fake: Service) -> None:
    """Imports would compete with running engines for each loaded model."""
    assert load(fake, "imports.pth", "imports")["error"] == "imported: []"


def test_a_name_is_taken_once_also_by_two_at_a_time(fake: Service) -> None:
    answers: list[Any] = []

    def ask() -> None:
        body = {"file": "slow.pth", "name": "two", "wait_s": WAIT_S}
        answers.append(fake.post("/v1/models/load", body, headers=ADMIN, timeout=2 * WAIT_S))

    num_routers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in num_routers:
        asker.start()
    wait_for(lambda: all(fake.get("/v1/models/two").status_code == 200 for _ in range(ALL)), 20, "it is known")
    if fake.get("/v1/models/two").json()["status"] == "loading":
        assert fake.post(CHAT, {**WHO, "model": "two"}).status_code in (200, 503)
    for asker in num_routers:
        asker.join(60)
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    answer = fake.post("/v1/models/load", {"file": "good.pth", "name": "rwkv7"}, headers=ADMIN)
    assert answer.status_code == 409 and "is loaded" in answer.json()["error"]
    unload(fake, "two")


def test_the_number_of_models_is_limited(fake: Service) -> None:
    for name in ("a", "b", "c"):
        load(fake, "good.pth", name)
    answer = fake.post("/v1/models/load", {"file": "good.pth", "name": "d"}, headers=ADMIN)
    assert answer.status_code == 409 and "--max-models" in answer.json()["error"]
    for name in ("a", "b", "c"):
        unload(fake, name)


@pytest.mark.parametrize(
    "file", ["../x.pth", "/etc/passwd", "notes.txt", "none.pth", "a\0b.pth", "x" * 4000 + ".pth", "."]
)
def test_only_model_files_within_the_folder(fake: Service, file: str) -> None:
    answer = fake.post("/v1/models/load", {"file": file, "name": "n"}, headers=ADMIN)
    assert answer.status_code == 422 and answer.json()["field"] == "file", answer.text
    assert ".gguf file within --models-dir, which has broken.pth, dying.pth, good.pth" in answer.json()["error"]


def test_loading_needs_the_administrator(fake: Service) -> None:
    for path, body in (("load", {"file": "good.pth"}), ("unload", {"name": "good"})):
        assert fake.request("POST", f"/v1/models/{path}", json=body).status_code == 401


def test_a_waiting_load_of_an_unloaded_model_gets_an_error(fake: Service) -> None:
    answers: list[Any] = []
    body = {"file": "slow.pth", "name": "given-up", "wait_s": 600}
    waiting = threading.Thread(target=lambda: answers.append(fake.post("/v1/models/load", body, headers=ADMIN)))
    waiting.start()
    share = lambda: fake.get("/v1/models/given-up").json().get("loaded")  # noqa: E731 - one use
    wait_for(lambda: share() == 0.25, 20, "it is being loaded")
    assert unload(fake, "given-up")["status"] == "unloaded"
    waiting.join(60)
    assert [answer.status_code for answer in answers] == [404], answers


def test_a_lost_engine_of_a_model_is_started_again_alone(fake: Service) -> None:
    load(fake, "good.pth", "lost")
    wait_for_all_workers(fake, "lost", "lost")
    base = fake.pids()["engine"]
    victim = next(pid for pid in _engines(fake) if pid != base)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: victim not in _engines(fake) and len(_engines(fake)) == 2, 20, "a new engine")
    wait_for_all_workers(fake, "lost", "lost")
    assert fake.pids()["engine"] == base
    unload(fake, "lost")


def test_streams_of_a_model_end_whole_when_it_is_unloaded(fake: Service) -> None:
    load(fake, "other.pth", "leaving")
    wait_for_all_workers(fake, "leaving", "leaving")
    body = {"contents": ["abc"], "model": "leaving", "max_tokens": 150, "chunk_size": 1, "stream": True}
    with fake.stream(CHAT, body) as stream:
        pieces = stream.iter_text()
        first = next(pieces)
        fake.post("/v1/models/unload", {"name": "leaving"}, headers=ADMIN)
        text = first + "".join(pieces)
    assert text.count("abc") == 150 and "[DONE]" in text and '"error"' not in text
    wait_for(lambda: len(_engines(fake)) == 1, 20, "its engine has ended")


def test_load_and_unload_during_streams_leaks_nothing(fake: Service) -> None:
    """Every stream is complete, and the service holds the same resources afterwards."""
    body = {"contents": ["abc"], "max_tokens": 400, "chunk_size": 1, "stream": True}
    texts: list[str] = []

    def listen() -> None:
        with fake.stream(CHAT, body) as stream:
            texts.append("".join(stream.iter_text()))

    def one_round(number: int) -> None:
        load(fake, "good.pth", f"round-{number}")
        assert unload(fake, f"round-{number}")["status"] == "unloaded"
        wait_for(lambda: len(_engines(fake)) == 1, 20, "its engine has ended")

    one_round(0)
    files, kilobytes = _held(fake)
    listeners = [threading.Thread(target=listen) for _ in range(8)]
    for listener in listeners:
        listener.start()
    for number in range(1, 4):
        one_round(number)
    for listener in listeners:
        listener.join(60)
    assert len(texts) == 8 and all(text.count("abc") == 400 and '"error"' not in text for text in texts)
    wait_for(lambda: _held(fake)[0] <= files, 20, "no more files are open than were")
    assert _held(fake)[1] - kilobytes < 50_000, "KiB of memory: less than a process has"


def test_an_idle_model_is_unloaded_and_a_busy_one_stays(folder: Path, tmp_path: Path) -> None:
    arguments = ("--models-dir", str(folder), "--model-idle-s", "4", "--http-workers", "1")
    with FreshService(tmp_path, *arguments, program="test/fake_app.py", PYTHONPATH=".") as service:
        load(service, "good.pth", "idle")
        load(service, "other.pth", "busy")
        body = {"contents": ["abc"], "model": "busy", "max_tokens": 550, "chunk_size": 1, "stream": True}
        with service.stream(CHAT, body) as stream:
            text = "".join(stream.iter_text())
        assert text.count("abc") == 550 and '"error"' not in text  # for longer than the limit
        wait_for(lambda: service.post(CHAT, {**WHO, "model": "idle"}).status_code == 404, 20, "the idle one left")
        assert service.terminate() == 0
        log = service.log.read_text()
        assert "Traceback" not in log and "is lost" not in log


def test_lines_of_a_batch_go_to_the_models_they_name(folder: Path, tmp_path: Path) -> None:
    arguments = ("--models-dir", str(folder), "--http-workers", "1")
    with FreshService(tmp_path, *arguments, program="test/fake_app.py", PYTHONPATH=".") as service:
        load(service, "good.pth", "other")
        named = ("other", "rwkv7", "none")
        lines = [{"custom_id": m, "method": "POST", "url": CHAT, "body": {**WHO, "model": m}} for m in named]
        client = client_of(service)
        batch = ended(client, begun(client, lines).id)
        answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
        said = {m: one["response"]["body"]["choices"][0]["message"]["content"].strip() for m, one in answers.items()}
        assert said == {"other": "other", "rwkv7": "rwkv7"} and errors["none"]["response"]["status_code"] == 404


def _held(service: Service) -> tuple[int, int]:
    """Return (open files, KiB of anonymous memory) of the service. Its supervisor and serving processes count."""
    processes = [Path(f"/proc/{pid}") for pid in (service.process.pid, *service.pids().values())]
    lines = [line for process in processes for line in (process / "status").read_text().splitlines()]
    files = sum(len(list((process / "fd").iterdir())) for process in processes)
    return files, sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _engines(service: Service) -> set[int]:
    """Return the engine processes: the supervisor spawns the first; a fork server forks the others."""
    own = children(service.process.pid)
    forked = [fork for child, command in own.items() if b"test.fake_engine" in command for fork in children(child)]
    return {*forked, *(child for child, command in own.items() if b"spawn_main" in command)}
