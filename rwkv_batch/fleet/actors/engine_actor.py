"""An engine as an actor: the engine and its server as in an engine process, links instead of a socket.

The supervisors of all machines that take part watch it. When the last one leaves, or none was heard for a while, it
ends its work, stores its states and leaves the cluster. What kills its process Ray starts anew.

Threads: a pool's for calls, of which the streams of events hold one for each HTTP worker; one for each HTTP worker, on
which its messages are handled; the engine's own; one that loads the engine and looks after it.
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
from rwkv_batch.fleet.actors.removal import remove_engine_actor
from rwkv_batch.ipc.buffered_link import BufferedLink
from rwkv_batch.ipc.process import SWITCH_INTERVAL_S, LogStyle, set_up_logging
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.server import MAX_WORKERS, MONITOR_INTERVAL_S, EngineMonitor, EngineServer, started_engine
from rwkv_batch.ipc.wire import HEARTBEAT_S, ToEngine, ToWorker, to_engine_decoder

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""An HTTP worker that says nothing for so long is gone: its jobs are cancelled."""
STALL_S = 1.25
"""One speaks every half second: after so long it or this process stood still. What comes then may be work that it has
given to another engine meanwhile, since it takes this one for lost after two seconds."""
UNWATCHED_S = 60.0
"""An engine of which no supervisor has asked for so long leaves."""
SHUTDOWN_GRACE_S = 5.0
"""What an engine that ends gets beyond --drain-timeout-s before its process is killed, as the supervisor gives it."""
_RELOAD_S = 5.0
"""Between two attempts to load what has served before."""
CONCURRENCY_GROUPS = {"events": MAX_WORKERS, "push": 4, "life": 4}
"""Threads of the actor for its calls of each kind; streams must not hold up the others."""


class EngineInfo(NamedTuple):
    """What an engine says of itself."""

    status: ModelStatus
    error: str
    pid: int
    node: str
    """Its node's IP address."""
    since: int
    has_served: bool
    serves: str
    """Model and database, which all that take part must mean."""


class EngineActor:
    """See above. `placement.place` makes it an actor."""

    def __init__(self, name: str, config: EngineConfig, factory: str, style: LogStyle, serves: str) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        set_up_logging(name, style)
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
        """when each was heard last, by time.monotonic"""
        self._last_watched_at = time.monotonic()
        self._to_drain: queue.Queue[bool] = queue.Queue()
        self._will_restart = True
        """Ray is to start the process anew when it ends."""
        threading.Thread(target=self._run, name="engine-life", daemon=True).start()

    # HTTP workers --------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="events")
    def events(self, peer: str) -> Iterator[list[bytes]]:
        """All that is sent to an HTTP worker, in pieces as `BufferedLink` makes them, until it is gone."""
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
                    logger.warning("an HTTP worker has said nothing for %.0f s; its jobs are cancelled", link.silent_s)
                    return
        finally:
            del self._links[peer]
            link.close()

    @ray.method(concurrency_group="push")
    def push(self, peer: str, pieces: list[bytes], read_bytes: int) -> bool:
        """What an HTTP worker sends, and how much of its events it has read; False: its link is gone."""
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
        """An HTTP worker closes its link."""
        link = self._links.get(peer)
        if link is not None:
            link.close()

    # Supervisors ---------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="life")
    def info(self, watcher: str = "") -> EngineInfo:
        """What it is. Who asks by a name counts as a watcher from now on."""
        if watcher:
            self._watchers[watcher] = self._last_watched_at = time.monotonic()
        return self._info

    @ray.method(concurrency_group="life")
    def leave(self, watcher: str) -> bool:
        """A watcher leaves; returns whether it was the last one, so that the engine leaves too."""
        self._watchers.pop(watcher, None)
        heard = list(self._watchers.values())  # at once: another one may just be asking
        is_last = not any(time.monotonic() - at < SILENT_S for at in heard)
        if is_last:
            self._to_drain.put(False)
        return is_last

    @ray.method(concurrency_group="life")
    def drain(self, will_restart: bool) -> EngineInfo:
        """End running work within --drain-timeout-s and store the states; then leave, or be started anew."""
        self._set_status(ModelStatus.UNLOADING)
        self._to_drain.put(will_restart)
        return self._info

    # Life ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # an engine's fault: nobody else would notice that this thread has ended
            logger.exception("the engine failed")
        finally:
            self._end()

    def _serve(self) -> None:
        """Be an engine until it is to end."""
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
        """Until it is to end, looking meanwhile; returns whether it is to come back."""
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
                logger.error("no supervisor has asked for %.0f s; storing the states and ending", UNWATCHED_S)
                return False

    def _set_status(self, status: ModelStatus, error: str = "") -> None:
        self._info = self._info._replace(status=status, error=error, since=int(time.time()))

    def _kill_after_timeout(self) -> None:
        """End the process if a step or a disk hangs while it drains."""
        allowed_s = self._config.drain_timeout_s + SHUTDOWN_GRACE_S
        time.sleep(allowed_s)
        logger.error("the engine has not ended within %.0f s; its process is ended", allowed_s)
        self._end()

    def _end(self) -> None:
        """End the process, which Ray starts anew unless the actor has left the cluster."""
        try:
            logger.info("the engine has ended%s", ", to be started anew" if self._will_restart else "")
            if not self._will_restart:
                remove_engine_actor(self._name)
        except Exception:  # the head is away: started anew, and asked by nobody, it tries once more
            logger.exception("the engine cannot leave the cluster")
        finally:
            logging.shutdown()
            os._exit(1)
