"""This process as a driver of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import Any

from rwkv_batch.errors import StartupError
from rwkv_batch.fleet.actors.address import ClusterAddress

logger = logging.getLogger(__name__)

_LOCK = threading.Lock()
_RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call of a process that has left starts a cluster of its own
    # What a broken link costs at most; heartbeats of our own notice it sooner (`rwkv_batch.fleet.member`).
    "RAY_grpc_client_keepalive_time_ms": "2000",
    "RAY_grpc_client_keepalive_timeout_ms": "2000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # a process ends if the head is away for so long; Ray's is 60
}


def load_ray() -> Any:
    """The package. Raises StartupError where it is not installed."""
    for name, value in _RAY_ENV.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise StartupError("--cluster needs Ray: pip install -r requirements-cluster.txt") from None
    return ray


def join(cluster: ClusterAddress) -> Any:
    """Join the cluster, once in a process; returns the package. Raises StartupError with what is in the way."""
    ray = load_ray()
    with _LOCK:
        if not ray.is_initialized():
            logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of the signals that are ours
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
                if threading.current_thread() is threading.main_thread():  # there Ray has set a handler of its own
                    signal.signal(signal.SIGTERM, on_sigterm)
    return ray


def _end_listener(ray: Any) -> None:
    """Have Ray's thread end that prints errors of the cluster, with the next answer that it gets from the head.

    While the head is away it asks without a pause, for as much of a core as it gets, and this process's other threads
    wait for the interpreter meanwhile. What it would print nobody reads. Ray has no setting for it."""
    with contextlib.suppress(AttributeError):  # another version's
        ray._private.worker.global_worker.threads_stopped.set()


def _join_error(cluster: ClusterAddress, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    remedy = "has `ray start` been run on this machine with that address?"
    if "auth" in type(error).__name__.lower() or "token" in str(error).lower():
        remedy = "is it the token of the other nodes (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)?"
    return f"--cluster {cluster.head} cannot be joined ({type(error).__name__}: {reason}); {remedy}"
