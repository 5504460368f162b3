"""OpenAI's fine-tuning API with the official SDK: from upload to answer, stops, kills and restarts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from routes.request.model_names import parse_model_id
from routes.translation.languages import LABEL
from test.routes.conftest import openai_client
from test.serving import Service, raise_priority, training_processes, wait_for

pytestmark = pytest.mark.slow

ALICE, BOB = "key-of-alice", "key-of-bob"
KEYS = f'[[key]]\nname = "alice"\nkey = "{ALICE}"\n[[key]]\nname = "bob"\nkey = "{BOB}"\n'
ENDED = ("succeeded", "failed", "cancelled")


class _Folder:
    """Starts services over one database."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        (folder / "keys.toml").write_text(KEYS)

    def start(self) -> Service:
        arguments = ("--model-path", str(self._model), "--keys-file", str(self._folder / "keys.toml"))
        arguments += ("--threads", "1", "--http-workers", "1", "--admin-password", "the boss")
        running = Service(self._folder, *arguments, state_db=self._folder / "sessions.db")
        running.headers = {"Authorization": f"Bearer {ALICE}"}
        return running.wait_ready()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> _Folder:
    return _Folder(tmp_path_factory.mktemp("tuned"), tiny_model)


@pytest.fixture(scope="module")
def served(folder: _Folder) -> Iterator[Service]:
    running = folder.start()
    try:
        yield running
    finally:
        running.close()


def uploaded(client: openai.OpenAI, lines: Sequence[object]) -> str:
    content = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()
    file = client.files.create(file=("examples.jsonl", content), purpose="fine-tune")
    assert file.purpose == "fine-tune" and file.status == "processed"
    assert client.files.retrieve(file.id).model_dump()["num_tokens"] == file.model_dump()["num_tokens"] > len(lines)
    return file.id


def chat(asked: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


SHORT = [chat(f"Say {word}", "yes yes") for word in "one two three four five six seven eight nine ten".split()]
LONG = [chat(f"Number {i}", f"It is {i * 7919 % 1000}") for i in range(300)]


MARK = {"for": "a [test]&", "in[it]": ""}
HASTE: Any = {"n_epochs": 12, "batch_size": "auto", "learning_rate_multiplier": 4}
"""Teaches the answer of SHORT."""


def wait_for_status(service: Service, job_id: str, *statuses: str) -> Any:
    client = openai_client(service, key=ALICE)

    def look() -> Any:
        raise_priority(training_processes(service))
        job = client.fine_tuning.jobs.retrieve(job_id)
        assert job.status in statuses or job.status not in ENDED, job
        return job if job.status in statuses else None

    return wait_for(look, 60, f"the job is {' or '.join(statuses)}")


def said(client: openai.OpenAI, model: str) -> str | None:
    asked: Any = [{"role": "user", "content": "Say four"}]
    answer = client.chat.completions.create(model=model, messages=asked, temperature=0, max_tokens=8)
    return answer.choices[0].message.content


def messages_of(client: openai.OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id, limit=100)]


def files_of(service: Service) -> list[Path]:
    return [one for one in Path(f"{service.state_db}.files/content").iterdir() if one.is_file()]


def test_from_upload_to_answer(served: Service) -> None:
    client, other = openai_client(served, key=ALICE), openai_client(served, key=BOB)
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": HASTE}}
    job = client.fine_tuning.jobs.create(
        model="rwkv7", training_file=uploaded(client, SHORT), validation_file=uploaded(client, SHORT), method=method,
        suffix="yes", seed=3, metadata=MARK, extra_body={"tuning": "state+lora"},
    )  # fmt: skip
    assert job.status in ("queued", "running") and job.fine_tuned_model is None and job.metadata == MARK
    done = wait_for_status(served, job.id, "succeeded")
    name = done.fine_tuned_model
    assert name.startswith("ft:rwkv7:alice:yes:") and done.seed == 3 and done.trained_tokens > 100
    assert done.hyperparameters.n_epochs == 12 and done.hyperparameters.batch_size == 10
    events = messages_of(client, job.id)
    assert events[0] == f"The job has succeeded; the model is {name}" and "The held-out loss went from" in events[1]
    assert f"Created fine-tuning job: {job.id}" in events and any("only 10 lines differ" in one for one in events)
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert checkpoint.fine_tuned_model_checkpoint == name and checkpoint.step_number == 12
    table = client.files.content(done.result_files[0]).text.splitlines()
    assert table[0].startswith("step,train_loss") and len(table) == 13
    names = [client.files.retrieve(one).filename for one in done.result_files]
    assert names == ["step_metrics.csv", "tuned.state.pth", "tuned.lora.pth"]
    jobs = client.fine_tuning.jobs
    assert [one.id for one in jobs.list(limit=1)][:1] == [job.id] == [one.id for one in jobs.list(metadata=MARK)]
    assert not jobs.list(metadata={"for": "another"}).data and not jobs.list(extra_query={"metadata": "null"}).data
    with pytest.raises(openai.BadRequestError, match="metadata"):
        jobs.list(extra_query={"metadata": "for"})
    with pytest.raises(
        openai.BadRequestError, match=r"metadata\[for\]: must have at most 64 .*512 in its value"
    ) as refused:
        jobs.list(metadata={"for": "x" * 600})
    assert refused.value.param == "metadata[for]"
    with pytest.raises(openai.NotFoundError, match="checkpoints"):
        jobs.list_events(f"{job.id}/checkpoints")

    assert said(client, name) == "yes yes" != said(client, "rwkv7")
    assert client.completions.create(model=name, prompt="User: Say four\n\nAssistant:", max_tokens=3).model == name
    assert name in [model.id for model in client.models.list()] and client.models.retrieve(name).id == name
    assert not [model.id for model in other.models.list() if "ft" in model.id]
    for stranger in (lambda: said(other, name), lambda: other.models.delete(name), lambda: other.models.retrieve(name)):
        with pytest.raises(openai.NotFoundError, match="not found"):
            stranger()
    with pytest.raises(openai.NotFoundError):
        other.fine_tuning.jobs.retrieve(job.id)
    for none in ("rwkv7:none", "rwkv7+none"):  # the error listed all names; with one, another key could use the model
        with pytest.raises(openai.NotFoundError, match="is loaded") as refused:
            said(other, none)
        assert "ft-" not in str(refused.value)
    tuned = parse_model_id(name)
    assert tuned is not None
    hidden = [{"model": f"rwkv7:{tuned.name}"}, {"model": f"rwkv7+{tuned.name}"}, {"states": [{"name": tuned.name}]}]
    hidden += [{"state": tuned.name}, {"adapter": tuned.name}, {"state": "none"}, {"adapter": "none"}, {"model": "FT:"}]
    for fields in hidden:
        answer = served.request(
            "POST", "/v1/chat/completions", json={"messages": SHORT[0]["messages"], **fields},
            headers={"Authorization": f"Bearer {BOB}"},
        )  # fmt: skip
        assert answer.status_code == 404, (fields, answer.text)
        assert tuned.name in str(fields) or tuned.name not in answer.text
    translation = {"target_lang": "de", "text_list": ["Good morning"]}
    for key, fields, status in (
        (ALICE, {"model": name}, 200), (BOB, {"model": name}, 404), (BOB, {"state": tuned.name}, 404),
        (ALICE, {"model": "ft:rwkv7:alice::s0"}, 404),
    ):  # fmt: skip
        answer = served.request(
            "POST", "/translate/v1/batch-translate", json={**translation, **fields},
            headers={"Authorization": f"Bearer {key}"},
        )  # fmt: skip
        assert answer.status_code == status, (fields, answer.text)
    upload = {"files": {"file": ("a.txt", b"Good morning")}}
    for path, languages in (
        ("/translate/v1/documents", {"target_lang": "de"}), ("/v2/document", {"target_lang": "de"}),
        ("/translate_file", {"target": "de", "source": "en"}),
    ):  # fmt: skip
        for key, model, status in ((ALICE, name, 200), (BOB, name, 404), (ALICE, "ft:rwkv7:alice::s0", 404)):
            form: Any = {"data": {**languages, "model": model}, **upload}
            answer = served.request("POST", path, headers={"Authorization": f"Bearer {key}"}, **form)
            assert answer.status_code == status and (status == 200 or model in answer.text), (path, answer.text)
    lines = [one for file in files_of(served) if LABEL.encode() in (one := file.read_bytes())]
    lines = [one for one in lines if b"Good morning" in one and b"text_list" in one]
    assert len(lines) == 3 and all(f'"model":"{name}"'.encode() in one for one in lines), "the base translated them"
    with pytest.raises(openai.NotFoundError, match="'ft:rwkv7:alice::s0' not found") as unknown:
        said(client, "ft:rwkv7:alice::s0")
    assert unknown.value.param == "model"
    result = done.result_files[1]
    wait_for(lambda: client.files.retrieve(result).model_dump()["expires_at"] is None, 30, "it stays with the model")
    admin: Any = {"headers": {"Authorization": "Bearer the boss"}}
    for fields in ({"job": job.id, "file": "a.pth"}, {"job": "ftjob-none"}, {}):
        assert served.request("POST", "/v1/adapters", json={"name": "all", **fields}, **admin).status_code == 422
    published = served.request("POST", "/v1/adapters", json={"name": "all", "job": job.id}, **admin)
    assert published.status_code == 200, published.text
    assert client.models.delete(name).deleted
    assert client.files.retrieve(done.result_files[1]).model_dump()["expires_at"] > done.finished_at
    with pytest.raises(openai.NotFoundError):
        said(client, name)
    assert said(other, "rwkv7+all") != said(other, "rwkv7"), "the copy outlives the job's own model"
    copy = Path(published.json()["file"])
    assert copy.exists() and served.request("DELETE", "/v1/adapters/all", **admin).status_code == 200
    assert not copy.exists()
    assert name not in [model.id for model in client.models.list()]


def test_bad_files_and_settings_are_refused_by_name(served: Service) -> None:
    client, other = openai_client(served, key=ALICE), openai_client(served, key=BOB)
    bad = [*SHORT, "{", chat("a", "")]
    with pytest.raises(openai.BadRequestError, match=r"line 11: .*\n.*line 12: messages\[1\].content") as refused:
        uploaded(client, bad)
    assert refused.value.param == "file"
    with pytest.raises(openai.BadRequestError, match="has 9 lines; give at least 10"):
        uploaded(client, SHORT[:9])
    misspelt = [{"messages": [SHORT[0]["messages"][0], {**SHORT[0]["messages"][1], "wieght": 0}]}, *SHORT]  # type: ignore[index]
    content = "\n".join(map(json.dumps, misspelt)).encode()
    (warning,) = client.files.create(file=("a.jsonl", content), purpose="fine-tune").model_dump()["warnings"]
    assert "messages[].wieght" in warning["message"] and warning["message"].endswith("nearest known name is weight")
    file = uploaded(client, SHORT)
    create: Any = client.fine_tuning.jobs.create
    for fields, message in (
        ({"training_file": "file-x"}, "no file of purpose fine-tune has the id 'file-x'"),
        ({"validation_file": "file-x"}, "validation_file"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"method": {"type": "dpo"}}, "method.type"),
        ({"hyperparameters": {"n_epochs": 0}}, "n_epochs"),
        ({"hyperparameters": {"learning_rate_multiplier": True}}, "learning_rate_multiplier"),
        ({"suffix": "x" * 65}, "suffix"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            create(**{"model": "rwkv7", "training_file": file, **fields})
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' not found"):
        create(model="gpt-4o", training_file=file)
    with pytest.raises(openai.BadRequestError, match="training_file"):
        other.fine_tuning.jobs.create(model="rwkv7", training_file=file)


def test_a_job_pauses_continues_after_a_kill_and_a_restart_and_is_cancelled(folder: _Folder, served: Service) -> None:
    client = openai_client(served, key=ALICE)
    numbers: Any = {"n_epochs": 100, "batch_size": 1}
    job = client.fine_tuning.jobs.create(model="rwkv7", training_file=uploaded(client, LONG), hyperparameters=numbers)
    short = uploaded(client, SHORT)
    waiting = client.fine_tuning.jobs.create(model="rwkv7", training_file=short, hyperparameters={"n_epochs": 1})

    def has_step() -> bool:
        raise_priority(training_processes(served))
        return any(one.startswith("Step ") and "loss" in one for one in messages_of(client, job.id))

    wait_for(has_step, 60, "the job makes steps")
    assert client.fine_tuning.jobs.retrieve(waiting.id).status == "queued"
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    with pytest.raises(openai.BadRequestError, match="pause needs one that is queued or running"):
        client.fine_tuning.jobs.pause(job.id)
    wait_for_status(served, waiting.id, "succeeded")  # the paused one makes room
    client.fine_tuning.jobs.resume(job.id)
    wait_for_status(served, job.id, "running")
    (process,) = wait_for(lambda: training_processes(served), 30, "the process runs")
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: any("killed by SIGKILL" in one for one in messages_of(client, job.id)), 30, "the kill is noticed")
    wait_for(lambda: set(training_processes(served)) - {process}, 30, "another process continues")
    assert served.terminate() == 0
    wait_for(lambda: not training_processes(served), 30, "the process ends with the service")
    again = folder.start()
    try:
        client = openai_client(again, key=ALICE)
        wait_for_status(again, job.id, "running")
        wait_for(lambda: training_processes(again), 30, "it continues")
        done = client.fine_tuning.jobs.cancel(job.id)
        assert done.status == "cancelled" and done.finished_at
        wait_for(lambda: not training_processes(again), 30, "the process has ended")
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            client.fine_tuning.jobs.cancel(job.id)
        name = client.fine_tuning.jobs.retrieve(waiting.id).fine_tuned_model
        assert name is not None and said(client, name)  # the finished job's model is kept
    finally:
        again.close()
