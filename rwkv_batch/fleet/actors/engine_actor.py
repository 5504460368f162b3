"""An engine as a Ray actor: an engine and its server, with links over actor calls instead of a socket.

The supervisors of all participating machines watch it. After the last one leaves or falls silent, it drains, stores its
states and leaves the cluster. If its process is killed, Ray restarts it.

Threads:
- a pool for actor calls; each HTTP worker's stream of events occupies one
- one per HTTP worker, which handles its messages
- the engine's own
- one that loads the engine and monitors it
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import ray

from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.driver import remove_engine_actor
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.process import SWITCH_INTERVAL_S, LogConfig, set_up_logging
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.server import MAX_WORKERS, MONITOR_INTERVAL_S, EngineMonitor, EngineServer, started_engine
from rwkv_batch.ipc.wire import HEARTBEAT_S, ToEngine, ToWorker, to_engine_decoder

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""Seconds of silence after which an HTTP worker counts as gone. Its jobs are cancelled."""
STALL_S = 1.25
"""Seconds of silence after which a worker or this process must have paused. Workers speak every half second.

A worker gives up a silent engine after two seconds. So later messages may contain jobs that run elsewhere now.
"""
UNWATCHED_S = 60.0
"""Seconds without a supervisor's request after which an engine leaves."""
SHUTDOWN_GRACE_S = 5.0
"""Seconds beyond --drain-timeout-s before a draining engine's process is killed."""
_RELOAD_S = 5.0
"""Seconds between two attempts to load an engine that has served before."""
CONCURRENCY_GROUPS = {"events": MAX_WORKERS, "push": 4, "life": 4}
"""Threads of the actor per kind of call. Streams must not block other calls."""


class EngineInfo(NamedTuple):
    status: ModelStatus
    error: str
    pid: int
    node: str
    since: int
    has_served: bool
    serves: str
    """model and database, which must be the same for all participants"""


class EngineActor:
    """The Ray actor that runs an engine. `placement.place` creates it."""

    def __init__(self, name: str, config: EngineConfig, factory: str, log_config: LogConfig, serves: str) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        set_up_logging(name, log_config)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in an engine process
        context = ray.get_runtime_context()
        self._name = name
        self._config = config
        self._factory = factory
        self._info = EngineInfo(
            status=ModelStatus.LOADING,
            error="",
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            since=int(time.time()),
            has_served=bool(context.was_current_actor_reconstructed),
            serves=serves,
        )
        self._server: EngineServer | None = None
        self._links: dict[str, BufferedLink[ToEngine, ToWorker]] = {}
        self._watchers: dict[str, float] = {}
        """time.monotonic() of each watcher's last request"""
        self._last_watched_at = time.monotonic()
        self._to_drain: queue.Queue[bool] = queue.Queue()
        self._will_restart = True
        """whether Ray restarts the process after it ends"""
        threading.Thread(target=self._run, name="engine-life", daemon=True).start()

    # HTTP workers --------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="events")
    def events(self, peer: str) -> Iterator[list[bytes]]:
        """Yield everything sent to an HTTP worker until it is gone. It comes in a `BufferedLink`'s pieces."""
        server = self._server
        if server is None:
            return
        link: BufferedLink[ToEngine, ToWorker] = BufferedLink(to_engine_decoder)
        try:
            self._links[peer] = link
            threading.Thread(target=server.serve, args=(link,), name="worker-receive", daemon=True).start()
            while (pieces := link.take(HEARTBEAT_S)) is not None:
                if pieces:
                    yield pieces
                if link.silent_s > SILENT_S:
                    logger.warning("an HTTP worker was silent for %.0f s; cancelling its jobs", link.silent_s)
                    return
        finally:
            del self._links[peer]
            link.close()

    @ray.method(concurrency_group="push")
    def push(self, peer: str, pieces: list[bytes], read_bytes: int) -> bool:
        """Receive an HTTP worker's pieces and its count of read bytes. Returns False if its link is gone."""
        link = self._links.get(peer)
        if link is None:
            return False
        if link.silent_s > STALL_S:
            link.put_stale(pieces)
        else:
            link.put(pieces)
        link.acknowledge(read_bytes)
        return True

    @ray.method(concurrency_group="push")
    def close_link(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.close()

    # Supervisors ---------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="life")
    def info(self, watcher: str = "") -> EngineInfo:
        """Return the engine's report about itself. A caller with a name counts as a watcher."""
        if watcher:
            now = self._watchers[watcher] = self._last_watched_at = time.monotonic()
            for name, at in list(self._watchers.items()):  # killed ones did not leave; their names do not return
                if now - at >= SILENT_S:
                    self._watchers.pop(name, None)
        return self._info

    @ray.method(concurrency_group="life")
    def leave(self, watcher: str) -> bool:
        """Returns whether the watcher was the last one. If so, the engine leaves too."""
        self._watchers.pop(watcher, None)
        times = list(self._watchers.values())  # a copy: another thread may add a watcher
        is_last = not any(time.monotonic() - at < SILENT_S for at in times)
        if is_last:
            self._to_drain.put(False)
        return is_last

    @ray.method(concurrency_group="life")
    def drain(self, will_restart: bool) -> EngineInfo:
        """End running work within --drain-timeout-s and store the states. Then leave, or restart."""
        self._set_status(ModelStatus.UNLOADING)
        self._to_drain.put(will_restart)
        return self._info

    # Start and stop ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # nothing else would notice that this thread has ended
            logger.exception("the engine failed")
        finally:
            self._end()

    def _serve(self) -> None:
        try:
            engine = started_engine(self._config, self._factory)
        except StartupError as error:
            self._set_status(ModelStatus.FAILED, str(error))
            logger.error("%s", error)
            self._will_restart = self._wait(lambda: None, _RELOAD_S if self._info.has_served else None)
            return
        self._server = EngineServer(engine)
        self._info = self._info._replace(has_served=True)
        self._set_status(ModelStatus.READY)
        self._will_restart = self._wait(EngineMonitor(engine, self._config), None)
        self._set_status(ModelStatus.UNLOADING)
        threading.Thread(target=self._kill_after_timeout, name="engine-end", daemon=True).start()
        engine.drain(self._config.drain_timeout_s)
        engine.stop()

    def _wait(self, check: Callable[[], None], max_s: float | None) -> bool:
        """Call `check` until the engine should end. Returns whether it should restart."""
        begun = time.monotonic()
        while True:
            try:
                return self._to_drain.get(timeout=MONITOR_INTERVAL_S)
            except queue.Empty:
                pass
            check()
            now = time.monotonic()
            if max_s is not None and now - begun > max_s:
                return True
            if now - self._last_watched_at > UNWATCHED_S:
                logger.error("no supervisor has called for %.0f s; storing the states and ending", UNWATCHED_S)
                return False

    def _set_status(self, status: ModelStatus, error: str = "") -> None:
        self._info = self._info._replace(status=status, error=error, since=int(time.time()))

    def _kill_after_timeout(self) -> None:
        """End the process if the drain does not end. A step or a disk may hang while the engine drains."""
        allowed_s = self._config.drain_timeout_s + SHUTDOWN_GRACE_S
        time.sleep(allowed_s)
        logger.error("the engine has not ended within %.0f s; ending its process", allowed_s)
        self._end()

    def _end(self) -> None:
        """End the process. Ray restarts it unless the actor has left the cluster."""
        try:
            logger.info("the engine has ended%s", "; Ray restarts it" if self._will_restart else "")
            if not self._will_restart:
                remove_engine_actor(self._name)
        except Exception:  # the head is unreachable; Ray restarts the actor, which then leaves unwatched
            logger.exception("the engine cannot leave the cluster")
        finally:
            logging.shutdown()
            os._exit(1)
