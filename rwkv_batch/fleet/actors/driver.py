"""Joins a Ray cluster as a driver."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.plan import ClusterAddress

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()
_RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call after leaving would start a new cluster
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # a process ends after this time without the head; default 60
}


def load_ray() -> Any:
    """Import and return the `ray` package. Raises StartupError if it is not installed."""
    for name, value in _RAY_ENV.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise StartupError("--cluster needs Ray: pip install -r requirements-cluster.txt") from None
    return ray


def join(cluster: ClusterAddress) -> Any:
    """Join once per process. Returns the `ray` package. Raises StartupError with the cause."""
    ray = load_ray()
    with _LOCK:
        if not ray.is_initialized():
            logging.getLogger("ray").setLevel(logging.ERROR)  # at lower levels it logs this service's own signals
            on_sigterm = signal.getsignal(signal.SIGTERM)
            node = {"_node_ip_address": cluster.node} if cluster.node else {}
            try:
                ray.init(
                    address=cluster.head,
                    namespace=cluster.namespace,
                    log_to_driver=False,
                    configure_logging=False,
                    **node,
                )
                _end_listener(ray)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise StartupError(_join_error(cluster, error)) from None
            finally:
                if threading.current_thread() is threading.main_thread():  # Ray has replaced the handler there
                    signal.signal(signal.SIGTERM, on_sigterm)
    return ray


def _end_listener(ray: Any) -> None:
    """Stop Ray's thread that prints the cluster's errors.

    It stops after its next answer from the head. While the head is unreachable, it retries without a pause and takes
    the interpreter from the other threads. Ray has no setting for it.
    """
    with contextlib.suppress(AttributeError):  # in other versions of Ray
        ray._private.worker.global_worker.threads_stopped.set()


def _join_error(cluster: ClusterAddress, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    remedy = "has `ray start` been run on this machine with that address?"
    if "auth" in type(error).__name__.lower() or "token" in str(error).lower():
        remedy = "is it the token of the other nodes (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)?"
    return f"--cluster {cluster.head} cannot be joined ({type(error).__name__}: {reason}); {remedy}"


def remove_engine_actor(name: str) -> None:
    """End an engine for good and free its placement group."""
    ray = load_ray()
    from ray.util import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):
        actor = ray.get_actor(name)
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(name))
        ray.kill(actor, no_restart=True)
