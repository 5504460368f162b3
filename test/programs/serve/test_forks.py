"""Processes forked from a server process that has imported their modules. Also from one that still imports them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from programs.serve.child import Child
from programs.serve.fork_context import MAX_PENDING_FORKS, ForkedContext
from test.serving import ROOT, is_process_alive, wait_for

pytestmark = pytest.mark.slow

WAIT_S = 60
ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
from programs.serve.child import export_python_path
from programs.serve.http_workers import PRELOAD_MODULE, fork_context
export_python_path()
process = fork_context().Process(target=exec, args=(f"import sys; sys.exit({PRELOAD_MODULE!r} in sys.modules)",))
process.start()
process.join()
print(process.exitcode)
"""
MAIN = """
print(__name__, flush=True)
if __name__ == "__main__":
    from programs.serve.fork_context import ForkedContext
    process = ForkedContext("json").Process(target=print, args=("forked",))
    process.start()
    process.join()
"""
SIGINT_IS_IGNORED = """
import signal, sys
is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN or is_blocked)
"""
SLOW = """
with open({gate!r}) as gate:
    gate.read()
"""


def engine(folder: str, name: str, pipe: Connection) -> None:
    """Report the name, then follow commands."""
    (Path(folder) / name).write_text("it ran")
    pipe.send(("ready", (os.getpid(), os.getppid(), "slow" in sys.modules)))
    with contextlib.suppress(EOFError):
        sys.exit(pipe.recv())


@pytest.fixture(autouse=True)
def longer_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise timeouts: on a busy machine a process needs time to end."""
    monkeypatch.setattr("programs.serve.child._JOIN_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr("programs.serve.fork_context._STATUS_TIMEOUT_S", WAIT_S)


@pytest.fixture()
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's imports end when this pipe has been opened and closed."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    (tmp_path / "slow.py").write_text(SLOW.format(gate=str(path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return path


def test_a_server_that_starts_ignores_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    """The terminal sends it to the whole group; the supervisor ends the others in order."""
    context = ForkedContext()
    server: Any = context._server
    server.ensure_running()
    try:
        os.kill(server._forkserver_pid, signal.SIGINT)
        process = context.Process(target=exec, args=(SIGINT_IS_IGNORED,))
        process.start()
        process.join()
        assert process.exitcode == 0 and not capfd.readouterr().err
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        context.end()


def test_forks_share_what_was_imported_wherever_the_command_was_started(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, str(ROOT)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "1", ran.stderr


def test_forks_do_not_run_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(MAIN)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "command"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["__main__", "forked"], ran.stderr


SUPERVISOR = """
import time
from programs.serve.fork_context import ForkedContext
context = ForkedContext("slow")
process = context.Process(target=print)
process.start()
print(context._server._forkserver_pid, flush=True)
time.sleep(600)
"""


def opened(gate: Path) -> None:
    gate.write_text("")


def child(context: ForkedContext, folder: Path, name: str) -> Child:
    made = Child(name, context, engine, (str(folder),))
    made.start()
    return made


def first_message(one: Child) -> Any:
    """Return the first message, polled like the supervisor does."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        wait(one.waitables, 1.0)
        assert one.is_alive
        for _, value in one.messages():
            return value
    raise AssertionError("it said nothing")


def test_forks_have_the_servers_imports_and_their_end_is_reported(gate: Path, tmp_path: Path) -> None:
    context = ForkedContext("slow")
    two = [child(context, tmp_path, name) for name in ("a", "b")]
    opened(gate)
    (pid, server, has_it), (other, same_server, _) = first_message(two[0]), first_message(two[1])
    assert has_it and server == same_server not in (pid, other, os.getpid())
    assert [one.process.pid for one in two if one.process is not None] == [pid, other]
    two[0].send_command(7)
    assert two[0].reap() == "exit code 7"
    two[1].kill()
    assert "SIGKILL" in two[1].reap()


def test_a_process_may_end_while_it_is_killed(gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = child(ForkedContext("slow"), tmp_path, "one")
    opened(gate)
    first_message(one)
    send = signal.pidfd_send_signal

    def too_late(descriptor: int, number: int) -> None:
        one.send_command(7)
        for _ in range(WAIT_S * 100):
            send(descriptor, 0)  # fails once the server has reaped it
            time.sleep(0.01)

    monkeypatch.setattr(signal, "pidfd_send_signal", too_late)
    one.kill()
    assert one.reap() == "exit code 7"


def test_killing_does_not_wait_for_the_server(gate: Path, tmp_path: Path) -> None:
    """A process killed before its fork has ended at once. It never runs."""
    context = ForkedContext("slow")
    killed, kept = child(context, tmp_path, "killed"), child(context, tmp_path, "kept")
    assert killed.is_alive and kept.process is not None and kept.process.pid is None
    killed.kill()
    assert not killed.is_alive and "SIGKILL" in killed.reap()
    opened(gate)
    first_message(kept)
    kept.send_command(0)
    assert kept.reap() == "exit code 0"
    assert not (tmp_path / "killed").exists()


def test_a_lost_server_is_replaced_and_its_forks_live(gate: Path, tmp_path: Path) -> None:
    context = ForkedContext("slow")
    first, killed = child(context, tmp_path, "first"), child(context, tmp_path, "killed")
    opened(gate)
    server = first_message(first)[1]
    first_message(killed)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not is_process_alive(server), WAIT_S, "the server is lost")
    assert not wait(first.waitables, 0.2) and first.is_alive and killed.is_alive
    again = child(context, tmp_path, "again")
    opened(gate)
    assert first_message(again)[1] != server
    again.send_command(3)
    assert again.reap() == "exit code 3"
    first.send_command(7)
    assert wait(first.waitables, WAIT_S)
    assert "exit code 255" in first.reap()  # how it ended its server would have known
    killed.kill()
    assert not killed.is_alive and "SIGKILL" in killed.reap()


def test_pending_forks_of_a_lost_server_have_ended(gate: Path, tmp_path: Path) -> None:
    context = ForkedContext("slow")
    waits = child(context, tmp_path, "waits")
    assert waits.is_alive
    os.kill(context._server._forkserver_pid, signal.SIGKILL)
    assert wait(waits.waitables, WAIT_S)
    assert "exit code 255" in waits.reap()


def test_a_stopped_server_blocks_nothing(gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("programs.serve.fork_context._STATUS_TIMEOUT_S", 0.1)
    context = ForkedContext("slow")
    three = [child(context, tmp_path, name) for name in ("ends", "killed", "another")]
    opened(gate)
    for one in three:
        first_message(one)
    server = context._server._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    three[0].send_command(7)
    assert wait(three[0].waitables, WAIT_S) and three[0].reap() == "exit code 255"
    for one in three[1:]:
        one.kill()
        assert not one.is_alive and "SIGKILL" in one.reap()
    context.end()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_without_pidfd_the_server_reports_ends(gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    context = ForkedContext("slow")
    one, lost = child(context, tmp_path, "one"), child(context, tmp_path, "lost")
    opened(gate)
    first_message(one)
    number = first_message(lost)[0]
    one.send_command(7)
    assert one.reap() == "exit code 7"
    os.kill(context._server._forkserver_pid, signal.SIGKILL)
    assert wait(lost.waitables, WAIT_S) and not lost.is_alive
    wait_for(lambda: not is_process_alive(number), WAIT_S, "what nobody can follow is ended")


def test_a_server_ends_with_the_service_whatever_it_imports(gate: Path, tmp_path: Path) -> None:
    context = ForkedContext("slow")
    waits = child(context, tmp_path, "waits")
    server = context._server._forkserver_pid
    waits.kill()
    context.end()
    assert not is_process_alive(server)


def test_a_server_ends_with_a_supervisor_that_is_killed_whatever_it_imports(gate: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        server = int(supervisor.stdout.readline())
        try:
            supervisor.kill()
            supervisor.wait()
            wait_for(lambda: not is_process_alive(server), 20, "the server has ended")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


def test_pending_forks_are_bounded(gate: Path, tmp_path: Path) -> None:
    """The server's socket holds only some requests. With more, the supervisor would wait in connect()."""
    context = ForkedContext("slow")
    before = _descriptors()
    for number in range(MAX_PENDING_FORKS - 1):
        one = child(context, tmp_path, f"killed-{number}")
        one.kill()
        one.reap()
    last = child(context, tmp_path, "last")
    assert _descriptors() < before + MAX_PENDING_FORKS + 20
    for _ in range(2 * MAX_PENDING_FORKS):
        with pytest.raises(BlockingIOError, match="waiting to be forked"):
            child(context, tmp_path, "refused")
    opened(gate)
    first_message(last)
    again = child(context, tmp_path, "again")
    first_message(again)
    assert not list(tmp_path.glob("killed-*"))
    assert _descriptors() < before + 20
    for one in (last, again):
        one.kill()
    context.end()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
