"""The supervisor of engines, HTTP workers, the batch process and nginx.

It restarts processes that die. A signal drains the service. Children end when their pipe to the supervisor closes.
"""

from __future__ import annotations

import ipaddress
import logging
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import msgspec

from native.files import TemporaryFolder
from programs.serve.child import Child, export_python_path
from programs.serve.cluster_engines import ClusterEngines
from programs.serve.engines import PRELOAD_MODULE, Engines, ModelLimits
from programs.serve.fork_context import ForkedContext
from programs.serve.http_workers import HttpWorkers, fork_context, http_process
from programs.serve.listeners import Listeners, open_listeners
from programs.serve.nginx import NginxConfig, find_nginx, nginx_process
from programs.settings import Settings
from routes.api_keys import KeysFile
from routes.config import HttpConfig
from routes.file_store import NONE, has_store
from routes.serving.stream_guard import GuardedStreams
from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.plan import ClusterAddress, ClusterPlan
from rwkv_batch.ipc.engine_main import engine_process
from rwkv_batch.ipc.process import LogConfig

logger = logging.getLogger("supervisor")

_KILL_GRACE_S = 5.0
"""Seconds after --drain-timeout-s until processes are killed."""
_FORCE_STOP_S = 5.0
"""Seconds after a second signal in which HTTP workers may end their streams with an error event."""
ENGINE_FACTORY = "rwkv_batch.engine:Engine"


def batches_process(*arguments: Any) -> None:
    """Main function of the process that runs batches."""
    import routes.serving.preload  # noqa: F401  # what it is forked with
    from programs.serve.batches.process import run_batches

    run_batches(*arguments)


def cluster_process(*arguments: Any) -> None:
    """Main function of the process that monitors a cluster's engines."""
    from rwkv_batch.fleet.actors.process import run_cluster

    run_cluster(*arguments)


_RELOAD = b"r"
"""Byte in the wake-up pipe that means "reload"."""


class Supervisor:
    """Runs the service until a signal ends it."""

    def __init__(
        self,
        settings: Settings,
        engine_factory: str = ENGINE_FACTORY,
        http_target: Callable[..., None] = http_process,
        listeners: Listeners | None = None,
    ) -> None:
        """Raises StartupError if the address is not available."""
        self._listeners = listeners or listen(settings)
        if self._listeners.front is not None:
            settings = _with_proxy_key(settings)
        settings = _with_shared_sessions(_with_files_dir(settings))
        self._settings = settings
        self._folder = TemporaryFolder()
        # multiprocessing would create a folder that stays if this process is killed.
        multiprocessing.current_process()._config["tempdir"] = self._folder.path  # type: ignore[attr-defined]
        export_python_path()
        log_config = LogConfig(settings.service.log_format, settings.service.log_level)
        spawn = multiprocessing.get_context("spawn")
        self._engines = self._make_engines(engine_factory, log_config, spawn)
        sockets = self._listeners.workers
        streams = GuardedStreams()
        http = (settings.http, log_config, sockets, streams.worker_link)
        keys = KeysFile(settings.http.keys_file)
        keys.read()
        self._http_forks = fork_context()
        self._workers = HttpWorkers(self._http_forks, http, len(sockets), keys, self._engines, http_target, streams)
        self._nginx: Child | None = None
        if self._listeners.front is not None:
            config = NginxConfig.build(settings, sockets)
            self._nginx = Child("nginx", spawn, nginx_process, (config, self._listeners.front, log_config))
        self._batches: Child | None = None
        if has_store(settings.http):
            self._batches = Child(
                "batches", self._http_forks, batches_process, (settings.http, settings.engine, log_config)
            )
        self._has_logged_serving = False
        self._wake_read, self._wake_write = os.pipe()
        self._sent_to_batches: tuple[object, ...] = ()
        """The batch process, and the names of keys and the list of engines that it received."""
        self._started: set[Child] = set()
        self._signals = 0

    def _make_engines(self, factory: str, log_config: LogConfig, spawn: SpawnContext) -> Engines | ClusterEngines:
        """Creates this machine's engines, or those of its cluster."""
        service, engine = self._settings.service, self._settings.engine
        limits = ModelLimits(service.max_models, service.model_idle_s, _KILL_GRACE_S)
        replicas = service.replica_devices or (engine.devices,) * max(1, service.replicas)
        replicas = () if service.cluster else replicas
        needed = PRELOAD_MODULE if factory == ENGINE_FACTORY else factory.partition(":")[0]
        self._engine_forks = forks = ForkedContext(engine_process.__module__, needed)
        engines = Engines(
            engine, self._folder.path, log_config, spawn, engine_process, factory, limits, replicas, forks
        )
        if not service.cluster:
            return engines
        plan = ClusterPlan(
            cluster=ClusterAddress(service.cluster, service.cluster_node, service.cluster_service),
            replicas=service.replicas,
            replica_devices=service.replica_devices,
            config=engine,
            factory=factory,
        )
        child = Child("cluster", spawn, cluster_process, (plan.with_absolute_paths(), log_config))
        return ClusterEngines(engines, child, engine.drain_timeout_s + _KILL_GRACE_S)

    def run(self) -> int:
        """Serves until a signal and returns the exit code. Raises StartupError if it cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_hangup)  # always, so that SIGHUP never ends the service
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background job would stop at its first log line
        try:
            while not self._signals:
                self._poll()
            self._drain()
            return 0
        finally:
            self._end_all()

    def _single_processes(self) -> list[Child]:
        """nginx and the batch process, if they run."""
        return [child for child in (self._nginx, self._batches) if child is not None]

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        os.write(self._wake_write, b"!")

    def _on_hangup(self, number: int, frame: object) -> None:
        os.write(self._wake_write, _RELOAD)

    def _poll(self) -> None:
        for child in self._single_processes():
            self._handle_messages(child)
            if child.process is not None and not child.is_alive:
                self._reap(child)
            if child.process is None and time.monotonic() >= child.restart_at:
                child.try_start()
        self._engines.poll()
        self._log_serving()
        self._update_batches()
        self._workers.poll()
        waitables = [self._wake_read, *self._workers.waitables, *self._engines.waitables]
        waitables += [one for child in self._single_processes() for one in child.waitables]
        if self._wake_read in wait(waitables, timeout=self._next_start_s()) and _RELOAD in os.read(self._wake_read, 64):
            self._workers.reload()

    def _update_batches(self) -> None:
        """Sends the keys' names and the engines to the batch process.

        Does so when the names, the list of engines or the process changes.
        """
        if self._batches is None or not self._batches.is_alive:
            return
        names, engines = self._workers.keys.names, self._engines.registered
        message = (self._batches.process, names, engines)
        if message != self._sent_to_batches:
            self._sent_to_batches = message
            self._batches.send_command(("keys", names))
            self._batches.send_command(("models", engines))

    def _next_start_s(self) -> float | None:
        now = time.monotonic()
        waits = [max(0.0, child.restart_at - now) for child in self._single_processes() if child.process is None]
        waits += [wait for wait in (self._workers.wait_s(), self._engines.wait_s()) if wait is not None]
        return min(waits, default=None)

    def _handle_messages(self, child: Child) -> None:
        for subject, value in child.messages():
            match subject:
                case "started":
                    self._started.add(child)
                    child.group = value
                case "used":
                    self._engines.mark_used(value)
                case "failed" if child not in self._started:
                    raise StartupError(value)
                case "failed":
                    logger.error("%s did not start again: %s", child.name, value)

    def _reap(self, child: Child) -> None:
        self._handle_messages(child)
        was_forked, cause = child.was_forked, child.reap()
        if child not in self._started and was_forked:
            raise StartupError(f"the {child.name} process ended while starting ({cause})")
        child.restart_later(cause)

    def _log_serving(self) -> None:
        if self._engines.is_up and not self._has_logged_serving:
            self._has_logged_serving = True
            http = self._settings.http
            headline = {"is_headline": True}
            logger.info("serving %s on http://%s:%d", http.model_name, _url_host(http.host), http.port, extra=headline)
            logger.info("Ctrl-C stops it: running requests get %.0f s", self._settings.engine.drain_timeout_s)

    def _drain(self) -> None:
        """Refuses new work and lets running work end. Then stores the states and ends the processes."""
        timeout_s = self._settings.engine.drain_timeout_s
        logger.info("shutting down: running requests get %.0f s; a second signal ends them at once", timeout_s)
        deadline = time.monotonic() + timeout_s + _KILL_GRACE_S
        self._workers.drain()
        if self._batches is not None:
            self._batches.send_command("drain")  # finished lines are kept, the others run at the next start
        self._engines.drain()
        self._wait_until(self._engines_have_ended, deadline)
        if self._nginx is not None:
            self._nginx.send_command("quit")  # it stops listening and ends after the workers' last answers
        self._workers.finish()
        deadline = max(deadline, time.monotonic() + _KILL_GRACE_S)  # engines may have used all of the time
        self._wait_until(lambda: not self._workers.any_alive, deadline)
        self._listeners.close()  # clients that nginx still reads get an error at once
        self._wait_until(lambda: self._nginx is None or not self._nginx.is_alive, deadline)
        if self._signals > 1:
            self._force_stop()
        logger.info("stopped")

    def _force_stop(self) -> None:
        """Ends at once. HTTP workers may still send an error to their clients."""
        self._engines.kill()
        self._workers.finish()
        deadline = time.monotonic() + _FORCE_STOP_S
        while self._workers.any_alive and time.monotonic() < deadline:
            time.sleep(0.02)

    def _engines_have_ended(self) -> bool:
        self._engines.poll()
        return not self._engines.any_alive

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        while self._signals < 2 and time.monotonic() < deadline and not condition():
            time.sleep(0.02)

    def _end_all(self) -> None:
        self._workers.kill()
        for child in reversed(self._single_processes()):
            child.kill()
        self._engines.kill()
        for forks in (self._http_forks, self._engine_forks):
            forks.end()
        self._listeners.close()
        multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
        self._folder.remove()


def listen(settings: Settings) -> Listeners:
    """Opens the service's sockets. Raises StartupError without nginx or without the address."""
    http = settings.http
    _warn_if_open(http)
    front = find_nginx(settings)
    return open_listeners(
        http.host, http.port, settings.service.http_workers, http.stall_timeout_s, front=front is not None
    )


def _warn_if_open(http: HttpConfig) -> None:
    """Logs who can use a service without a secret. Logs nothing if no other machine reaches it."""
    address = ipaddress.ip_address(http.host)
    if http.password or http.keys_file or address.is_loopback:
        return
    where = "every address of this machine" if address.is_unspecified else http.host
    logger.warning(
        "NO PASSWORD: everyone who reaches %s, port %d, can use the service, and read and delete all sessions; "
        "give --password-file or --keys-file, or --host 127.0.0.1",
        where,
        http.port,
    )


def _with_files_dir(settings: Settings) -> Settings:
    """Sets the folder of files and batches. Default: next to the session database, if there is one."""
    folder, state_db = settings.http.files_dir, settings.engine.pool.files_stem
    if folder == "auto":
        folder = f"{state_db}.files" if state_db else NONE
    if folder != NONE:
        folder = str(Path(folder).absolute())
    return msgspec.structs.replace(settings, http=msgspec.structs.replace(settings.http, files_dir=folder))


def _with_shared_sessions(settings: Settings) -> Settings:
    """Marks the engines as sharing one database with --replicas or --cluster."""
    pool = settings.engine.pool
    if not ((settings.service.replicas or settings.service.cluster) and pool.state_db):
        return settings
    pool = msgspec.structs.replace(pool, service=secrets.token_hex(8))
    engine = msgspec.structs.replace(settings.engine, pool=pool)
    http = msgspec.structs.replace(settings.http, shares_sessions=True)
    return msgspec.structs.replace(settings, engine=engine, http=http)


def _with_proxy_key(settings: Settings) -> Settings:
    http = msgspec.structs.replace(settings.http, proxy_key=secrets.token_hex(16))
    return msgspec.structs.replace(settings, http=http)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
