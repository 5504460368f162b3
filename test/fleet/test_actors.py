"""Engines as Ray actors: another link, the same streams. Ray starts slowly, so CI runs one short test here.

RWKV_LONG_TESTS=1 also kills actors, HTTP workers and a node during streams.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from bench.tools.cpu_time import cpu_s
from test.fleet.test_replicas import CHAT, Meanwhile, all_ready, body, engines, pid_of, texts
from test.ray_nodes import RayNodes, descendants
from test.serving import ROOT, Service, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing"),
]
long = pytest.mark.skipif(os.environ.get("RWKV_LONG_TESTS") != "1", reason="RWKV_LONG_TESTS=1 runs it")


@contextlib.contextmanager
def new_cluster() -> Iterator[RayNodes]:
    """A cluster without nodes."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        contextlib.closing(RayNodes(Path(folder))) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with new_cluster() as cluster:
        cluster.start(cpus=1)
        yield cluster


def joined(nodes: RayNodes, folder: Path, tiny_model: Path, *arguments: str, **environment: str) -> Service:
    common = ("--model-path", str(tiny_model), "--cluster", nodes.address, "--threads", "1", "--http-workers", "1")
    more = {**nodes.environment, **environment}
    return Service(folder, *common, *arguments, state_db="", **more)


def streams_of(service: Service) -> list[dict[int, str]]:
    return texts(service, [body(number) for number in range(9)])


def test_streams_over_ray_outlive_their_actor(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    service = joined(nodes, tmp_path, tiny_model, "--engine-wait-s", "300", "--cluster-service", "short")
    try:
        expected = streams_of(all_ready(service))
        pid = pid_of(service, "engine-0")
        (engine,) = engines(service).values()
        assert engine["node"] == "127.0.1.1" and engine["engine"] == "engine-0"
        streams = Meanwhile(service, [body(number) for number in range(9)])
        streams.wait_begun()
        os.kill(pid, signal.SIGKILL)
        assert streams.result() == expected
        assert pid_of(service, "engine-0") != pid
        assert service.terminate(240) == 0
        wait_for(lambda: not actors(), 60, "the engine has left with its last service")
    finally:
        service.close()


def actors() -> list[int]:
    """Processes of engines in clusters that the tests started."""
    return [pid for pid in descendants(os.getpid()) if b"EngineActor" in command(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@long
def test_the_text_equals_that_of_a_local_engine(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    local = Service(tmp_path, "--model-path", str(tiny_model), "--threads", "1")
    service = joined(nodes, tmp_path, tiny_model, "--cluster-service", "same")
    try:
        assert streams_of(all_ready(service)) == streams_of(local.wait_ready())
    finally:
        local.close()
        service.terminate()
        service.close()


@long
def test_rows_of_an_http_worker_that_dies_are_cancelled(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    service = joined(nodes, tmp_path, tiny_model, "--cluster-service", "worker")
    try:
        all_ready(service)
        with service.stream(CHAT, body(0, max_tokens=100_000)) as answer:
            pieces = answer.iter_text()
            next(pieces)
            os.kill(service.pids()["http-0"], signal.SIGKILL)
            assert "the HTTP worker process of this stream was lost" in "".join(pieces)
        wait_for(lambda: service.status()["running_rows"] == 0, 60, "its rows have ended")
        assert len(service.status()["processes"]["http_workers"]) == 1
        assert streams_of(service)
    finally:
        service.terminate()
        service.close()


@long
def test_streams_outlive_a_machine_and_engines_outlive_a_service(tiny_model: Path, tmp_path: Path) -> None:
    with new_cluster() as cluster:
        first = second = None
        try:
            head, other = cluster.start(cpus=1), cluster.start(cpus=1)
            first = joined(cluster, tmp_path, tiny_model, "--replicas", "2", "--cluster-node", head)
            all_ready(first)
            wait_for(lambda: all(one["status"] == "ready" for one in engines(first).values()), 60, "both are ready")
            second = joined(cluster, tmp_path, tiny_model, "--cluster-node", other)
            expected = streams_of(all_ready(second))
            assert {one["node"] for one in engines(second).values()} == {head, other}
            assert second.terminate() == 0 and len(actors()) == 2, "another service still uses the engines"
            streams = Meanwhile(first, [body(number) for number in range(9)])
            wait_for(lambda: all(one["rows"] for one in engines(first).values()), 30, "both have rows")
            cluster.kill(other)
            assert streams.result() == expected
            (lost,) = [one for one in engines(first).values() if one["node"] == other]
            assert lost["status"] != "ready"
            wait_for(lambda: "no node" in engines(first)[lost["engine"]]["error"], 60, "it waits for a node")
            # With room again, the engine starts there.
            back = cluster.start(cpus=1)
            wait_for(lambda: engines(first)[lost["engine"]]["node"] == back, 90, "it is placed again")
            all_ready(first)
            assert streams_of(first) == expected
        finally:
            for service in (first, second):
                if service is not None:
                    service.close()


@long
def test_all_engines_restart_without_a_failed_request(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    service = joined(nodes, tmp_path, tiny_model, "--engine-wait-s", "300", "--cluster-service", "rolling")
    try:
        expected = streams_of(all_ready(service))
        before = engines(service)["engine-0"]["pid"]
        streams = Meanwhile(service, [body(number) for number in range(9)])
        answer = service.post("/v1/engines/restart", {"engine": "all", "wait_s": 120}, timeout=150)
        assert answer.status_code == 200 and streams.result() == expected
        assert engines(service)["engine-0"]["pid"] not in (0, before)
        refused = service.post("/v1/engines/remove", {"engine": "engine-0"})
        assert refused.status_code == 422 and "last one" in refused.text
    finally:
        service.terminate()
        service.close()


@long
def test_a_wrong_token_or_model_is_refused(nodes: RayNodes, tiny_model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    service = joined(nodes, tmp_path, tiny_model, RAY_AUTH_TOKEN_PATH=str(wrong))
    assert service.process.wait(120) == 1
    assert "cannot be joined" in service.log.read_text() and "token" in service.log.read_text()
    first = joined(nodes, tmp_path, tiny_model, "--cluster-service", "one")
    try:
        all_ready(first)
        copy = tmp_path / "other.pth"
        copy.write_bytes(tiny_model.read_bytes())
        other = joined(nodes, tmp_path, copy, "--cluster-service", "one")
        assert other.process.wait(120) == 1 and "engine-0 of the cluster serves" in other.log.read_text()
    finally:
        first.terminate()
        first.close()


@long
def test_a_participating_process_idles_while_the_head_is_unreachable() -> None:
    program = (
        "import sys\n"
        "from rwkv_batch.fleet.actors.plan import ClusterAddress\n"
        "from rwkv_batch.fleet.actors.driver import join\n"
        "join(ClusterAddress(sys.argv[1], sys.argv[2], 'rests'))\n"
        "print('joined', flush=True)\n"
        "sys.stdin.read()"
    )
    with new_cluster() as nodes:
        head, node = nodes.start(cpus=0), nodes.start(cpus=1)
        command = [sys.executable, "-c", program, nodes.address, node]
        environment = {**os.environ, **nodes.environment}
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=environment) as joined:
            assert joined.stdout is not None and joined.stdout.readline() == b"joined\n"
            nodes.kill(head)
            time.sleep(2)
            before = cpu_s(joined.pid)
            time.sleep(4)
            assert joined.poll() is None
            assert cpu_s(joined.pid) - before < 0.4, "a busy thread takes most of a core"
            joined.kill()
