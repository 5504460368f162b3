"""The product's threads as tasks on one thread, with a virtual clock. The seed decides which task runs next.

The main task is the engine's thread. The others (writer, reader, …) are greenlets. They run when the main task yields
or waits. They stop at every lock, queue, crash point and SQL statement.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import greenlet

EPOCH = 1_700_000_000.0
"""`time.time()` at the start of every world."""


MAX_LAST_WAITS = 1000
MAX_SWITCHES = 100_000
"""Task switches within one wait of the main task."""


class Stuck(Exception):  # noqa: N818 - names an event
    """The main task waits for an event that no task will cause."""


class PowerLost(BaseException):
    """The main task waits after the machine has stopped. The product's handlers must not catch it."""


class Task:
    def __init__(self, tasks: Tasks, name: str, run: Callable[[], Any]) -> None:
        self.name = name
        self.process = tasks.process
        self.ended = False
        self.ready: Callable[[], bool] | None = None
        """whether it can go on; None: yes"""
        self.deadline: float | None = None
        self._tasks = tasks
        self._run = run
        self.greenlet = greenlet.greenlet(self._body, parent=tasks.main)

    def _body(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._tasks.died.append((self.name, error))
        finally:
            self.ended = True


class Tasks:
    """All tasks of a world, and its clock."""

    def __init__(self, rng: random.Random) -> None:
        self.main = greenlet.getcurrent()
        self.now = 0.0
        self.skew = 0.0
        """seconds by which the clock of the day was set ahead"""
        self._thread = threading.get_ident()
        self.has_stopped = False
        """whether the machine has lost its power: no task continues"""
        self._last_waits = 0
        """waits of a task that ends"""
        self._clock_set_at = 0.0
        self.died: list[tuple[str, Exception]] = []
        """threads that ended with an uncaught exception"""
        self._rng = rng
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._killing = False
        self.process: Any = None
        """the process of the current task; of the main task, the one that it acts for"""

    def start(self, name: str, run: Callable[[], Any]) -> Task:
        task = Task(self, name, run)
        self._tasks.append(task)
        return task

    def kill(self, process: Any = None) -> None:
        """End every task of a process where it stopped. None: of all processes."""
        self._killing, caller, self.process = True, self.process, process
        for task in self._tasks:
            if process is None or task.process is process:
                self._last_waits = 0
                task.greenlet.throw(greenlet.GreenletExit)
        self._tasks = [task for task in self._tasks if process is not None and task.process is not process]
        self._killing = self.has_stopped = False
        self.process = caller

    def pause(self) -> None:
        """Yield to the main task. Any state may change here."""
        if self._killing:
            self._end_soon()
        elif self._current is not None:
            self.main.switch()

    def _end_soon(self) -> None:
        """Let a task that ends take locks, but not run for ever."""
        self._last_waits += 1
        if self._last_waits > MAX_LAST_WAITS:
            raise greenlet.GreenletExit

    def set_clock(self, rng: random.Random, chance: float) -> None:
        """Perhaps set the clock of the day back or ahead. The product looks once a second, so not more often."""
        if rng.random() < chance and self.now >= self._clock_set_at + 3.0:
            self._clock_set_at = self.now
            self.skew += rng.choice((-1, 1)) * rng.uniform(3700.0, 86400.0)

    def stop_machine(self) -> None:
        """The power fails now. The calling task never continues."""
        self.has_stopped = True
        self.pause()

    def runs(self, name: str) -> bool:
        return self._current is not None and self._current.name == name

    def run_one(self) -> bool:
        """From the main task: run one task until it stops again. Returns False if none can run."""
        if self.has_stopped:
            return False
        now = self.now
        able = [
            task
            for task in self._tasks  # the hottest loop of a world: no call where none is needed
            if task.ready is None or task.ready() or (task.deadline is not None and now >= task.deadline)
        ]
        if not able:
            return False
        task = able[self._rng.randrange(len(able))] if len(able) > 1 else able[0]
        self._current = task
        caller, self.process = self.process, task.process
        try:
            task.greenlet.switch()
        finally:
            self._current, self.process = None, caller
        if task.ended:
            self._tasks.remove(task)
        return True

    def run(self, maximum: int) -> None:
        for _ in range(maximum):
            if not self.run_one():
                return

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready`, or for `timeout` virtual seconds. Returns whether it is ready."""
        if threading.get_ident() != self._thread:  # it belongs to an engine of an earlier test
            time.sleep(timeout or 0.05)
            return ready()
        deadline = None if timeout is None else self.now + timeout
        if self._killing:
            self._end_soon()
            return True
        if self._current is None:
            return self._wait_in_main(ready, deadline)
        task = self._current
        task.ready, task.deadline = ready, deadline
        while not ready() and not self._is_late(task):
            self.main.switch()
        task.ready = task.deadline = None
        return ready()

    def _wait_in_main(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        switches = 0
        while not ready():
            switches += 1
            if switches > MAX_SWITCHES:
                raise Stuck("the engine's thread waits while other threads run for ever")
            if self.has_stopped:
                raise PowerLost
            if deadline is not None and self.now >= deadline:
                return False
            if self.run_one():
                self.now += 0.00001  # a task that tries again and again must not stop the time
                continue
            ends = [end for end in (deadline, *(task.deadline for task in self._tasks)) if end is not None]
            if not ends:
                raise Stuck("the engine's thread waits and no other thread can go on")
            self.now = max(self.now, min(ends))
        return True

    def _is_late(self, task: Task) -> bool:
        return task.deadline is not None and self.now >= task.deadline


class PatchedModule:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Primitives:
    """Replacements of `threading`, `queue`, `time` and `concurrent.futures` by tasks."""

    def __init__(self, tasks: Tasks) -> None:
        def of(kind: type) -> Any:
            return type(kind.__name__.lstrip("_"), (kind,), {"hub": tasks})

        lock, simple_queue = of(_Lock), of(_SimpleQueue)
        kinds = (_Condition, _Semaphore, _Event, _Thread)
        self.threading = {"Lock": lock, "RLock": lock} | {kind.__name__.lstrip("_"): of(kind) for kind in kinds}
        self.queue = {"SimpleQueue": simple_queue, "Queue": simple_queue}
        self.time = {
            "monotonic": lambda: tasks.now,
            "perf_counter": lambda: tasks.now,
            "time": lambda: EPOCH + tasks.now + tasks.skew,
            "sleep": lambda seconds: tasks.wait(lambda: False, seconds),
        }
        self.executor = of(_Executor)


class _Lock:
    """Also reentrant."""

    hub: Tasks

    def __init__(self) -> None:
        self._holder: Any = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = greenlet.getcurrent()
        if self._holder is not me:
            self.hub.pause()
            if not self.hub.wait(lambda: self._holder is None, None if blocking and timeout < 0 else max(0.0, timeout)):
                return False
        self._holder = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    def __init__(self, lock: Any = None) -> None:
        super().__init__()
        self._waiting: deque[list[bool]] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        reported = [False]
        self._waiting.append(reported)
        depth, self._depth, self._holder = self._depth, 0, None
        if not self.hub.wait(lambda: reported[0], timeout):  # a later notify is for another wait
            self._waiting = deque(one for one in self._waiting if one is not reported)
        self.hub.wait(lambda: self._holder is None)
        self._holder, self._depth = greenlet.getcurrent(), depth
        return reported[0]

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self.hub.now + timeout
        while not predicate() and (end is None or self.hub.now < end):
            self.wait(None if end is None else end - self.hub.now)
        return predicate()

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Semaphore:
    hub: Tasks

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if not self.hub.wait(lambda: self._value > 0, timeout if blocking else 0.0):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n


class _Event:
    hub: Tasks

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self.hub.wait(lambda: self._set, timeout)


class _SimpleQueue:
    hub: Tasks

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        import queue

        if not self.hub.wait(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _Thread:
    hub: Tasks

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] = lambda: None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.ident: int | None = None
        self._run = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self.hub.start(self.name, self._run)
        self.ident = id(self)

    def join(self, timeout: float | None = None) -> None:
        if (task := self._task) is not None:
            self.hub.wait(lambda: task.ended, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended


class _Executor:
    """One worker, for any size."""

    hub: Tasks

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "executor") -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._closed = False
        self.hub.start(thread_name_prefix, self._run)

    def _run(self) -> None:
        while True:
            self.hub.wait(lambda: bool(self._jobs) or self._closed)
            if not self._jobs:
                return
            self._jobs.popleft()()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except Exception as error:
                future.set_exception(error)

        self._jobs.append(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._jobs.clear()
        self._closed = True
