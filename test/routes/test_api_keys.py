"""API keys with limits, request ids and the access log: as units, and in a real service."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from programs.settings import SettingsError, parse_settings
from routes.api_keys import KeysError, KeysFile, load_keys
from routes.config import HttpConfig
from routes.context import KeyRing
from routes.request.bodies import BatchBody
from routes.request.jobs import build_rows
from routes.request_context import RequestContext, request_id, set_current_request
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc.quotas import Quotas
from rwkv_batch.request import ClientLimits, GenerateRequest, Job, Usage
from test.harness import make_request
from test.resource_limits import run_bounded
from test.routes.conftest import bearer
from test.serving import ROOT, Service, read_all, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
PLAIN, FREE, HASHED, NARROW, CHIEF = "plain-key-1", "plain-key-2", "plain-key-3", "plain-key-4", "plain-key-5"
FILE = f"""
[[key]]
name = "few"
key = "{PLAIN}"
rows = 2
requests_per_minute = 6

[[key]]
name = "free"
key = "{FREE}"

[[key]]
name = "narrow"
key = "{NARROW}"
rows = 2

[[key]]
name = "hashed"
sha256 = "{hashlib.sha256(HASHED.encode()).hexdigest()}"
tokens_per_minute = 40

[[key]]
name = "chief"
key = "{CHIEF}"
admin = true
"""


def written(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def test_a_file_of_keys(tmp_path: Path) -> None:
    few, free, _, hashed, chief = load_keys(written(tmp_path, FILE))
    assert chief.admin and not few.admin
    assert few.limits == ClientLimits(rows=2, requests_per_minute=6)
    assert free.limits == ClientLimits()
    assert hashed.limits == ClientLimits(tokens_per_minute=40)
    file, ring = KeysFile(str(tmp_path / "keys.toml")), KeyRing(is_configured=True)
    assert not file.keys and ring.find(PLAIN) is None  # no keys are in force before `read`
    file.read()
    ring.replace(file.keys)
    assert [one and one.name for one in map(ring.find, (PLAIN, FREE, HASHED))] == ["few", "free", "hashed"]
    assert [ring.find(wrong) for wrong in ("", PLAIN[:-1], PLAIN + "x", few.digest, "few", "\ud800")] == [None] * 6
    for text, number in (("", len(file.keys)), ("key = []", 0)):
        written(tmp_path, text)
        file.read()
        assert len(file.keys) == number


def test_the_example_in_the_documents_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    assert [key.name for key in load_keys(written(tmp_path, example))] == ["team-a", "team-b"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys = 1", "key"),
        ("[[key]]\nkey = 'sk-secret-1'", "name"),
        ("[[key]]\nname = 'a'", "either key or sha256"),
        (f"[[key]]\nname = 'a'\nkey = 'sk-secret-1'\nsha256 = '{'0' * 64}'", "either key or sha256"),
        ("[[key]]\nname = 'a'\nkey = 'sk'", "8"),
        ("[[key]]\nname = 'a b'\nkey = 'sk-secret-1'", "name"),
        ("[[key]]\nname = 'a'\nkey = 'sk-secret-1'\nrow = 3", "row"),
        ("[[key]]\nname = 'a'\nkey = 'sk-secret-1'\nrows = 0", "rows"),
        ("[[key]]\nname = 'a'\nkey = 'sk-secret-1'\n[[key]]\nname = 'a'\nkey = 'sk-secret-2'", "twice"),
        ("[[key]]\nname = 'a'\nkey = 'sk-secret-1'\n[[key]]\nname = 'b'\nkey = 'sk-secret-1'", "twice"),
        ("[[key", "not a keys file"),
        ("", r"no \[\[key\]\]; write the line `key = \[\]`"),
        ("[[key]]\nname = \"a\\n\"\nkey = 'sk-secret-1'", "name"),
        ("[[key]]\nname = 'a'\nkey = \"sk-secret-1\\n\"", "key"),
        (f"[[key]]\nname = 'a'\nsha256 = \"{'0' * 64}\\n\"", "sha256"),
        ("[[key]]\nname = '10.0.0.7'\nkey = 'sk-secret-1'", "no IP address"),
    ],
)
def test_an_invalid_file_gives_a_one_line_error_without_keys(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(KeysError, match=named) as refusal:
        load_keys(written(tmp_path, text))
    assert "\n" not in str(refusal.value) and "sk-secret" not in str(refusal.value)
    with pytest.raises(SettingsError, match="--keys-file"):
        parse_settings(["--keys-file", str(tmp_path / "keys.toml")], {})
    with pytest.raises(KeysError, match="cannot be read"):
        load_keys(str(tmp_path / "none.toml"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ROW = [make_request([5] * 3)]


def usage(name: str, limits: ClientLimits, rows: Sequence[GenerateRequest] = ROW) -> Usage:
    used = Job(job_id=name, rows=list(rows), client="c", limits=limits).usage
    assert used is not None
    return used


def test_rows_are_counted_while_they_run() -> None:
    quotas, limits = Quotas(), ClientLimits(rows=4)
    assert quotas.count(usage("a", limits, ROW * 3)) is None
    refusal = quotas.count(usage("b", limits, ROW * 2))
    assert refusal is not None and refusal.kind is ErrorKind.OVERLOADED and refusal.retry_after_s
    assert "3 rows in progress" in refusal.message and "4 at once" in refusal.message
    assert quotas.count(usage("c", limits)) is None
    assert quotas.charge("a", 1)
    assert quotas.count(usage("e", limits)) is not None
    quotas.charge("a", 1, is_total=True)
    assert quotas.end("a")
    assert quotas.count(usage("e", limits, ROW * 3)) is None
    quotas.end("e", refund=True)
    quotas.end("e", refund=True)
    assert quotas.count(usage("f", limits, ROW * 3)) is None
    never = quotas.count(usage("g", limits, ROW * 5))
    assert never is not None and never.kind is ErrorKind.INVALID_FIELD


def test_a_mixture_counts_each_state_against_the_limits() -> None:
    """One row and one reading of each token per state."""
    mixed = [make_request([5] * 3, mixture=[("a", 1.0), ("", 1.0), ("b", 1.0)], n=2)]
    quotas, limits = Quotas(), ClientLimits(rows=7)
    assert quotas.count(usage("mixed", limits, mixed)) is None
    refusal = quotas.count(usage("second", limits, ROW * 2))
    assert refusal is not None and "6 rows in progress" in refusal.message
    never = quotas.count(usage("never", limits, mixed * 2))
    assert never is not None and never.given == 12 and "12 rows, one per state of its mixture" in never.message
    quotas.end("mixed", refund=True)
    assert quotas.count(usage("all", limits, ROW * 7)) is None

    clock = Clock()
    quotas, limits = Quotas(clock), ClientLimits(tokens_per_minute=60)
    assert quotas.count(usage("mixed", limits, mixed)) is None
    quotas.charge("mixed", 20, 7)
    assert quotas.end("mixed")
    refusal = quotas.count(usage("b", limits))
    assert refusal is not None and refusal.retry_after_s == pytest.approx(3 * 3 * 2 + (20 + 7) * 3 - 60 + 1)


def test_limits_per_minute_of_requests_and_tokens() -> None:
    clock = Clock()
    quotas, limits = Quotas(clock), ClientLimits(requests_per_minute=3)
    assert [quotas.count(usage(str(n), limits)) is None for n in range(5)] == [True, True, True, False, False]
    refusal = quotas.count(usage("x", limits))
    assert refusal is not None and refusal.retry_after_s == pytest.approx(20)
    clock.now += 20.1
    assert [quotas.count(usage(f"y{n}", limits)) is None for n in range(2)] == [True, False]

    quotas, limits = Quotas(clock), ClientLimits(tokens_per_minute=60)
    assert quotas.count(usage("a", limits, [make_request([5] * 10)])) is None
    quotas.charge("a", 90)
    assert quotas.end("a")
    refusal = quotas.count(usage("b", limits))
    assert refusal is not None and refusal.retry_after_s == pytest.approx(41)
    clock.now += 41.5
    assert quotas.count(usage("b", limits, [make_request([5] * 1000)])) is None
    quotas.end("b", refund=True)
    assert quotas.count(usage("c", limits)) is None


def test_rows_above_a_keys_limit_are_refused_before_a_job_is_built() -> None:
    """Not even a prompt is encoded."""
    body = BatchBody(contents=["a"], states=[{"name": "s"}, {"name": ""}], max_tokens=1)  # type: ignore[list-item]
    set_current_request(RequestContext(client="few", limits=ClientLimits(rows=5)))
    try:
        for prompts, n in ((["a"] * 3, 1), (["a"], 3)):
            with pytest.raises(ServiceError, match=r"6 rows, one per state.*few may have 5") as refusal:
                build_rows(cast(Any, None), HttpConfig(), body, prompts, [], "contents", n)
            assert refusal.value.info.field == "rows"
    finally:
        set_current_request(RequestContext())


def test_valid_request_ids_are_kept() -> None:
    assert request_id("abc-1_2.3:4/5=@+") == "abc-1_2.3:4/5=@+"
    for odd in (None, "", "a b", "a\n", "é", "x" * 129, "a,b"):
        assert re.fullmatch("[0-9a-f]{32}", request_id(odd))


@pytest.mark.parametrize(
    ("default", "maximum", "given", "limit"),
    [(0, 0, None, None), (0, 0, 7, 7), (5, 0, None, 5), (5, 0, 9, 9), (5, 3, None, 3), (0, 3, None, 3), (5, 9, 8, 8)],
)
def test_time_limits(default: float, maximum: float, given: float | None, limit: float | None) -> None:
    from routes.response.generate import time_limit

    config = HttpConfig(default_timeout_s=default, max_timeout_s=maximum)
    assert time_limit(config, given) == limit
    if maximum:
        with pytest.raises(ServiceError, match="--max-timeout-s") as refusal:
            time_limit(config, maximum + 1)
        assert refusal.value.info.field == "timeout_s"


def test_the_access_log_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    from types import SimpleNamespace

    from routes.serving.http import report

    engine = SimpleNamespace(observe=lambda observation: None)
    with caplog.at_level(logging.DEBUG, "access"):
        for access_log in (False, True):
            context: Any = SimpleNamespace(engine=engine, config=HttpConfig(access_log=access_log))
            report(context, RequestContext(request_id="r", method="GET", route="/x"), 200, "done")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("form", ["json", "text"])
def test_log_lines_have_the_request_id(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import logging, sys; from routes.request_context import RequestContext, set_current_request; "
        "from routes.serving.access import add_request_ids; "
        "from rwkv_batch.ipc.process import LogConfig, set_up_logging; "
        "set_up_logging('p', LogConfig(sys.argv[1])); add_request_ids(); logging.getLogger('x').warning('before'); "
        "set_current_request(RequestContext(request_id='r-1')); logging.getLogger('x').warning(sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", script, form, "within\u2028" if form == "json" else "within"], cwd=ROOT, check=True
    )
    before, within = capfd.readouterr().err.splitlines()
    assert "before" in before and "request_id" not in before
    assert ('"request_id":"r-1"' if form == "json" else "within request_id=r-1") in within


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two HTTP workers and an engine without a model. The keys file `keys.toml` is next to the log."""
    folder = tmp_path_factory.mktemp("keyed")
    flags = ("--http-workers", "2", "--keys-file", written(folder, FILE), "--log-format", "json")
    with Service(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        running.headers, running.admin_headers = bearer(FREE), bearer(CHIEF)
        yield running


def log_lines(service: Service) -> list[dict[str, Any]]:
    whole, _, _ = service.log.read_text().rpartition("\n")  # another line may be in progress after it
    lines = (json.loads(line) for line in whole.splitlines() if line.startswith("{"))
    return [line for line in lines if line["logger"] == "access"]


def test_a_key_is_required(keyed: Service) -> None:
    body = {"contents": ["a"], "max_tokens": 1}
    assert keyed.post(CHAT, body).status_code == 200
    assert keyed.post(CHAT, {**body, "password": HASHED}, headers=bearer("-")).status_code == 200
    for wrong in ("-", "few", PLAIN + "x"):
        refused = keyed.post(CHAT, body, headers=bearer(wrong))
        assert refused.status_code == 401
        assert refused.json()["request_id"] == refused.headers["x-request-id"]
    assert keyed.post(CHAT, {**body, "password": "wrong"}, headers=bearer("-")).status_code == 401
    for anthropics, status in (
        ({"x-api-key": FREE, **bearer("-")}, 200),
        ({"x-api-key": f"{FREE}0"}, 401),
        ({"x-key": FREE}, 401),
    ):
        answer = keyed.request("POST", CHAT, json=body, headers=anthropics)
        assert answer.status_code == status and answer.headers["request-id"] == answer.headers["x-request-id"]


def test_keys_do_not_affect_each_other(keyed: Service) -> None:
    body = {"name": "x", "file": "x.pth"}
    assert keyed.post("/v1/states", body, headers={"Authorization": f"Bearer {FREE}"}).status_code == 401
    assert keyed.post("/v1/states", {**body, "password": FREE}).status_code == 401


def test_names_counts_and_paths_need_admin_rights(keyed: Service) -> None:
    body = {"contents": ["a"], "max_tokens": 1}
    assert keyed.post(CHAT, body, headers=bearer(NARROW)).status_code == 200
    figures, status = (keyed.request("GET", path, headers=bearer(CHIEF)) for path in ("/metrics", "/status"))
    assert 'client="narrow"' in figures.text and "processes" in status.json()
    for path in ("/metrics", "/status", "/v1/requests"):
        shown = keyed.get(path)
        for secret in ("narrow", "chief", str(keyed.state_db.parent), '"pid"', "rows"):
            assert secret not in shown.text.replace("max_running", ""), (path, secret)
    limits = {"admin": False, "rows": 2, "tokens_per_minute": None, "requests_per_minute": None}
    assert {"name": "narrow", **limits} in status.json()["keys"] and NARROW not in status.text
    assert keyed.get("/status").json()["model"] == status.json()["model"]


def test_a_key_without_admin_rights_is_told_so(keyed: Service) -> None:
    for headers in (bearer(FREE), {}):
        refused = keyed.post("/v1/states", {"name": "x", "file": "x.pth", "password": FREE}, headers=headers)
        assert refused.status_code == 401
        assert "'free' has no admin rights" in refused.json()["error"]
        assert "password" not in refused.json()["error"], "it has no use for one"
    for secret in (bearer(CHIEF), {}):
        assert keyed.post("/v1/states", {"password": CHIEF}, headers={**bearer("-"), **secret}).status_code == 422


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1}}),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 1}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
    ],
)
def test_other_formats_need_a_key_and_count_it(keyed: Service, path: str, fields: dict[str, Any]) -> None:
    for headers in (bearer(NARROW), {"x-api-key": NARROW}):
        answer = keyed.request("POST", path, json=fields, headers={**headers, "X-Request-Id": f"count-{len(headers)}"})
        assert answer.status_code == 200, answer.text
    assert keyed.request("POST", path, json=fields, headers={"x-api-key": "wrong"}).status_code == 401
    wait_for(lambda: sum(is_of(line, "narrow", path) for line in log_lines(keyed)) == 2, 20, "both are logged")


def is_of(line: dict[str, Any], client: str, path: str) -> bool:
    return (line.get("client"), line.get("route"), line.get("rows")) == (client, path, 1)


def test_slots_need_admin_rights(keyed: Service) -> None:
    for key, status in ((NARROW, 401), (CHIEF, 200)):
        assert keyed.request("GET", "/slots", headers=bearer(key)).status_code == status


def test_a_key_sees_and_cancels_only_its_own_requests(keyed: Service) -> None:
    path, endless = "/big_batch/completions", {"contents": ["a"], "max_tokens": 1_000_000}
    with keyed.sent(path, endless, bearer(FREE)) as others, keyed.sent(path, endless, bearer(NARROW)) as own:
        assert others.recv(12) == own.recv(12) == b"HTTP/1.1 200"
        for headers in (bearer(FREE), bearer(NARROW)):
            seen = keyed.request("GET", "/big_batch/completions-status", headers=headers).json()
            assert seen == {"generating": True, "requests": 1}
        assert keyed.request("GET", "/big_batch/completions-status", headers=bearer(CHIEF)).json()["running_rows"] == 2
        assert keyed.post("/big_batch/clean", headers=bearer(NARROW)).json()["cancelled"] == 1
        assert b'"cancelled"' in read_all(own)
        assert keyed.status()["jobs"] == {"big_batch": 1}
        assert keyed.post("/big_batch/clean", headers=bearer(FREE)).json()["cancelled"] == 1
    keyed.wait_idle()


def test_requests_of_a_minute_are_counted_over_all_workers(keyed: Service) -> None:
    def status(number: int) -> Any:
        return keyed.post(CHAT, {"contents": ["a"], "max_tokens": 1}, headers=bearer(PLAIN))

    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(status, range(12)))
    refilled = int((time.monotonic() - begun) / 10) + 1  # one per tenth of a minute
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 6 <= sum(answer.status_code == 200 for answer in answers) <= 6 + refilled
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "the key few may send 6 requests a minute" in refused.json()["error"]
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert keyed.post(CHAT, {"contents": ["a"], "max_tokens": 1}).status_code == 200, "another key is not concerned"
    figures = keyed.request("GET", "/metrics", headers=bearer(CHIEF)).text
    assert re.search(r'rwkv_client_requests_total\{client="few",outcome="refused"\} \d', figures)
    taken = sum(answer.status_code == 200 for answer in answers)
    assert re.search(rf'rwkv_client_tokens_total\{{client="few",kind="completion"\}} {taken}\b', figures)


def test_running_rows_are_uncounted_when_the_client_disconnects(keyed: Service) -> None:
    endless = {"contents": ["a", "b"], "max_tokens": 1_000_000, "stream": True}
    short = {"contents": ["c"], "max_tokens": 1}
    with keyed.sent(CHAT, endless, bearer(NARROW)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        refused = keyed.post(CHAT, short, headers=bearer(NARROW))
        assert refused.status_code == 429
        assert "2 rows in progress and may have 2 at once" in refused.json()["error"]
        assert keyed.post(CHAT, short).status_code == 200, "another key is not concerned"
    wait_for(lambda: keyed.post(CHAT, short, headers=bearer(NARROW)).status_code == 200, 20, "its rows are free")
    never = keyed.post(CHAT, {**short, "contents": ["a"] * 3}, headers=bearer(NARROW))
    assert (never.status_code, never.json()["given"]) == (422, 3)


def test_the_access_log_has_a_line_per_request(keyed: Service) -> None:
    body = {"contents": ["abc", "d"], "max_tokens": 8, "chunk_size": 2, "stream": True}
    keyed.post(CHAT, body, headers={"X-Request-Id": "one-stream"})
    keyed.post(CHAT, {**body, "temperature": -1}, headers={"X-Request-Id": "one-mistake"})
    keyed.post("/nowhere", {}, headers={"X-Request-Id": "no-route"})
    endless = {**body, "max_tokens": 1_000_000}
    with keyed.sent(CHAT, endless, {**bearer(FREE), "X-Request-Id": "leaver"}) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    with keyed.sent(CHAT, {**endless, "stream": False}, {**bearer(FREE), "X-Request-Id": "silent-leaver"}):
        wait_for(lambda: keyed.status()["running_rows"], 20, "it runs")
    names = {"one-stream", "one-mistake", "no-route", "leaver", "silent-leaver"}
    wait_for(lambda: names <= {line["request_id"] for line in log_lines(keyed)}, 20, "all lines")
    lines = {line["request_id"]: line for line in log_lines(keyed) if line["request_id"] in names}
    stream = lines["one-stream"]
    reported = {name: stream[name] for name in ("client", "route", "status", "outcome", "rows", "prompt_tokens")}
    assert reported == {
        "client": "free", "route": CHAT, "status": 200, "outcome": "done", "rows": 2, "prompt_tokens": 2,
    }  # fmt: skip
    assert stream["completion_tokens"] == 16
    assert 0 < stream["ttft_s"] <= stream["total_s"] and stream["queue_s"] >= 0
    assert (lines["one-mistake"]["status"], lines["one-mistake"]["outcome"]) == (422, "invalid_field")
    refused = lines["one-mistake"]["refused"]
    assert refused["field"] == "temperature" and "got -1" in refused["message"]
    assert "/nowhere" in lines["no-route"]["refused"]["message"] and "refused" not in stream
    assert (lines["no-route"]["status"], lines["no-route"]["route"]) == (404, "other")
    assert (lines["leaver"]["status"], lines["leaver"]["outcome"]) == (200, "client_left")
    assert (lines["silent-leaver"]["status"], lines["silent-leaver"]["outcome"]) == (499, "client_left")


@pytest.mark.slow
def test_a_file_of_many_keys_is_read_in_linear_time(tmp_path: Path) -> None:
    """Each key was compared with all others: 20,000 took minutes, at every SIGHUP."""
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[[key]]\nname = "k{i}"\nkey = "secret-{i}"\n' for i in range(20_000)))
    assert len(run_bounded(load_keys, str(file), cpu_s=20).result) == 20_000


def test_sighup_reloads_the_keys(keyed: Service) -> None:
    file = keyed.log.parent / "keys.toml"
    new = FILE.replace(PLAIN, "another-key") + '\n[[key]]\nname = "new"\nkey = "brand-new-key"\n'

    def get(key: str) -> int:
        return keyed.request("GET", "/status", headers=bearer(key)).status_code

    def all_answer(key: str, status: int) -> bool:
        """Wait until all workers answer so. Requests reach random workers; the error probability is below 10^-9."""
        return all(get(key) == status for _ in range(30))

    assert all_answer("brand-new-key", 401)
    file.write_text(new)
    keyed.process.send_signal(signal.SIGHUP)
    wait_for(lambda: all_answer("brand-new-key", 200) and all_answer(PLAIN, 401), 20, "the new file is in force")
    file.write_text("[[key")
    keyed.process.send_signal(signal.SIGHUP)
    wait_for(lambda: keyed.log.read_text().count("stay in force") == 1, 20, "it complains")
    assert all_answer("brand-new-key", 200)
    before = keyed.pids()
    del before["engine"]
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(keyed.pids().values()) - set(before.values())) == 3, 20, "spares have taken over")
    assert all_answer("brand-new-key", 200), "with the keys in force, not what stands in the file just now"
    file.write_text(FILE)
    keyed.process.send_signal(signal.SIGHUP)
    wait_for(lambda: all_answer("brand-new-key", 401) and all_answer(FREE, 200), 20, "the old file is in force")


@pytest.mark.slow
def test_a_key_that_has_used_its_tokens_stays_refused_when_an_engine_is_lost(tmp_path: Path) -> None:
    """Whichever of the two engines held the ledger. The key would have to wait for more than an hour."""
    flags = ("--replicas", "2", "--http-workers", "2", "--keys-file", written(tmp_path, FILE), "--engine-wait-s", "60")
    service = Service(tmp_path, *flags, "--admin-password", "boss", program="test/fake_app.py", PYTHONPATH=".")
    service.headers = bearer("boss")
    try:
        service.wait_ready()
        body = {"contents": ["a"], "max_tokens": 4000, "chunk_size": 4000, "stream": True}
        used = service.post(CHAT, body, headers=bearer(HASHED))
        assert used.status_code == 200, used.text
        for name in ("engine-0", "engine-1"):
            service.wait(lambda: all(one["status"] == "ready" for one in service.status()["engines"]), 60)
            for _ in range(6):
                refused = service.post(CHAT, body, headers=bearer(HASHED))
                assert refused.status_code == 429 and "40 tokens a minute" in refused.text
            engines = {one["engine"]: one["pid"] for one in service.status()["engines"]}
            os.kill(engines.pop(name), signal.SIGKILL)
            assert service.post(CHAT, body, headers=bearer(HASHED)).status_code == 429
        other = service.post(CHAT, {**body, "max_tokens": 1}, headers=bearer(FREE))
        assert other.status_code == 200, "another key is not concerned"
    finally:
        service.close()
