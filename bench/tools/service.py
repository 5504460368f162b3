"""Starts a service of this project for a load. Summarises a run over HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.tools.cpu_time import cpu_s
from bench.tools.http_load import Load, fetch
from bench.tools.record import origin

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0
_APP = __name__.rpartition("bench.")[0] + "app"  # a wheel has it in rwkv_batch


@contextmanager
def service(arguments: Sequence[str], log: IO[bytes] | None = None, module: str = _APP) -> Iterator[str]:
    """Start a service and yield its URL when it is ready. Its log goes to standard error or a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="rwkv-bench-")
    flags = ["--port", str(port), "--state-db", str(Path(folder) / "served.db"), *arguments]
    process = subprocess.Popen([sys.executable, "-m", module, *flags], cwd=ROOT, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the service has loaded its model. Raises SystemExit."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the service ended with code {process.returncode}")
        try:
            fetch(url, "/readyz", "")
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{url} was not ready within {START_S:.0f} s")


def service_cpu_s(url: str) -> float:
    """Return the CPU seconds of a service's processes on this machine."""
    processes = json.loads(fetch(url, "/status", ""))["processes"]
    return sum(cpu_s(process["pid"]) for process in (processes["engine"], *processes["http_workers"]))


def percentile(values: Sequence[float], part: float) -> float | None:
    """Return the `part` quantile of the values, in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(part * len(values)))] * 1e3, 2) if values else None


def summary(load: Load, run: dict[str, Any]) -> dict[str, Any]:
    first = [figure[0] for figure in run["figures"] if figure[0]]
    gaps = [gap for figure in run["figures"] for gap in figure[1]]
    errors = [figure[2] for figure in run["figures"] if figure[2]]
    return {
        "tokens": int(run["tokens"]),
        "seconds": round(run["seconds"], 3),
        "tokens_per_s": round(run["tokens"] / run["seconds"], 1),
        "ttft_ms_p50": percentile(first, 0.5),
        "ttft_ms_p99": percentile(first, 0.99),
        "between_deltas_ms_p50": percentile(gaps, 0.5),
        "between_deltas_ms_p99": percentile(gaps, 0.99),
        "inter_token_ms_p50": percentile([gap / load.chunk_size for gap in gaps], 0.5),
        "inter_token_ms_p99": percentile([gap / load.chunk_size for gap in gaps], 0.99),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def machine(given_commit: str) -> dict[str, Any]:
    return origin(given_commit, "torch", "robyn", "msgspec")
