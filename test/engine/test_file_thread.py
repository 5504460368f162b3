"""A thread of tasks: every task gets one reply, its result or an error."""

from __future__ import annotations

import threading
from typing import Any

from rwkv_batch.core.file_thread import FileThread
from rwkv_batch.errors import ErrorKind, ServiceError

CLOSED = ServiceError(ErrorKind.DRAINING, "closed")
WAIT_S = 60


def make() -> FileThread:
    return FileThread("files", lambda: CLOSED, lambda error: ServiceError(ErrorKind.INTERNAL, str(error)))


def test_tasks_run_one_after_another() -> None:
    thread, done, replies = make(), threading.Event(), []
    seen: list[Any] = []
    thread.run(replies.append, lambda: seen.append("first") or 1, seen.append)  # type: ignore[func-returns-value]
    thread.run(replies.append, lambda: 1 // 0, seen.append)
    thread.run(replies.append, lambda: threading.current_thread().name, lambda name: (seen.append(name), done.set()))
    assert done.wait(WAIT_S)
    assert seen[:2] == ["first", 1] and seen[2].startswith("files")
    assert [str(reply) for reply in replies] == ["integer division or modulo by zero"]
    thread.close()


def test_tasks_that_do_not_start_are_refused() -> None:
    thread, begun, may_end, replies = make(), threading.Event(), threading.Event(), []
    ended = threading.Event()
    thread.run(replies.append, lambda: (begun.set(), may_end.wait(WAIT_S)), lambda _: ended.set())
    assert begun.wait(WAIT_S)
    for _ in range(2):
        thread.run(replies.append, lambda: replies.append("ran"), replies.append)
    thread.close()
    thread.run(replies.append, lambda: replies.append("ran"), replies.append)
    assert replies == [CLOSED] * 3
    may_end.set()
    assert ended.wait(WAIT_S) and replies == [CLOSED] * 3, "a task that runs ends"
