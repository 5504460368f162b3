"""Streams beside a fine-tuning job on the same device: token gaps, tokens/s, and the job's speed.

    python -m bench.tuning_beside --model-path FILE --dtype int8 --gpu-memory-utilization 0.4

Starts its own service and measures the streams alone, a job alone, then both. The streams are clients of the chat
route. The job tunes a state on lines of random words, `--lines` of about `--words` tokens at each step. Its speed is
counted between the first and the last step that ended in a phase. Unknown flags are the service's.

Prints one JSON line per phase; the last line has all, with the ratios beside / alone.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from bench.tools.http_load import WORDS, Load, over_http
from bench.tools.record import Arguments, finish, save
from bench.tools.service import machine, service, summary

_FILE_LINES = 320
_POLL_S = 0.05
_BOUNDARY = "tuning-beside"


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for the service."""
    parser = Arguments(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2400, help="of a stream")
    parser.add_argument("--chunk-size", type=int, default=4, help="tokens of a delta")
    parser.add_argument("--words", type=int, default=700, help="of a line's answer")
    parser.add_argument("--lines", type=int, default=5, help="of a step of the job")
    parser.add_argument("--alone-s", type=float, default=8.0, help="seconds that the job has the device")
    parser.add_argument("--start-s", type=float, default=120.0, help="at most, until the job's third step")
    return parser.parse_known_args()


def request(url: str, path: str, body: bytes | None = None, kind: str = "application/json") -> dict[str, Any]:
    """Return the answer to a GET, or to a POST of a body."""
    headers = {"Content-Type": kind} if body is not None else {}
    with urllib.request.urlopen(urllib.request.Request(url + path, data=body, headers=headers), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def data_file(words: int) -> bytes:
    generator = random.Random(1)

    def text(count: int) -> str:
        return " ".join(generator.choice(WORDS) for _ in range(count))

    lines = [{"prompt": f"Say it: {text(40)}", "completion": f" {text(words)}"} for _ in range(_FILE_LINES)]
    return "\n".join(map(json.dumps, lines)).encode()


def start_job(url: str, words: int, lines: int) -> str:
    """Upload a file and start a job on it; return its id."""
    parts = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--{_BOUNDARY}\r\n'
        'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    )
    body = parts.encode() + data_file(words) + f"\r\n--{_BOUNDARY}--\r\n".encode()
    file = request(url, "/openai/v1/files", body, f"multipart/form-data; boundary={_BOUNDARY}")
    wanted = {
        "model": "rwkv7", "training_file": file["id"], "hyperparameters": {"n_epochs": 3, "batch_size": lines}
    }  # fmt: skip
    job: str = request(url, "/openai/v1/fine_tuning/jobs", json.dumps(wanted).encode())["id"]
    return job


class StepClock:
    """Follows a job: when its steps ended."""

    def __init__(self, url: str, job: str) -> None:
        self._path = f"/openai/v1/fine_tuning/jobs/{job}"
        self._url, self._step = url, 0
        self._ended: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(_POLL_S):
            for event in request(self._url, f"{self._path}/events?limit=10")["data"]:
                step = (event.get("data") or {}).get("step", 0)
                if "train_loss" in (event.get("data") or {}) and step > self._step:
                    self._step = step
                    self._ended.append((time.monotonic(), step))

    def wait_for(self, step: int, seconds: float) -> None:
        """Wait until a step has ended. Raises SystemExit."""
        deadline = time.monotonic() + seconds
        while self._step < step:
            if time.monotonic() > deadline:
                events = [event["message"] for event in request(self._url, f"{self._path}/events?limit=5")["data"]]
                raise SystemExit(f"the job has not done {step} steps in {seconds:.0f} s: {events}")
            time.sleep(_POLL_S)

    def during(self, phase: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Return a phase's result, and the job's steps per second meanwhile."""
        began = time.monotonic()
        result = phase()
        ended = [one for one in self._ended if one[0] >= began]
        speed = (ended[-1][1] - ended[0][1]) / (ended[-1][0] - ended[0][0]) if len(ended) > 1 else 0.0
        return result, {"steps": len(ended), "steps_per_s": round(speed, 3)}


def measure(url: str, options: argparse.Namespace, say: Callable[[str, Any], None]) -> dict[str, float]:
    """Measure the three phases; return the ratios."""
    route = "/v1/chat/completions"
    load = Load(route, options.streams, 1, 1, options.max_tokens, 16, options.chunk_size, True, "")

    def streams() -> dict[str, Any]:
        return summary(load, over_http(load, url, 2))

    over_http(Load(route, options.streams, 1, 1, 64, 16, options.chunk_size, True, ""), url, 2)  # captures graphs
    say("streams_alone", alone := streams())
    job = start_job(url, options.words, options.lines)
    clock = StepClock(url, job)
    try:
        clock.wait_for(3, options.start_s)
        _, job_alone = clock.during(lambda: time.sleep(options.alone_s))
        say("job_alone", job_alone)
        beside, job_beside = clock.during(streams)
        say("streams_beside", beside)
        say("job_beside", job_beside)
    finally:
        clock.stop()
        request(url, f"/openai/v1/fine_tuning/jobs/{job}/cancel", b"{}")
    gap = "between_deltas_ms_p99"
    return {
        "p99_gap": round(beside[gap] / alone[gap], 3),
        "tokens_per_s": round(beside["tokens_per_s"] / alone["tokens_per_s"], 3),
        "job": round(job_beside["steps_per_s"] / max(1e-9, job_alone["steps_per_s"]), 3),
    }


def main() -> None:
    options, arguments = parse()
    found: dict[str, Any] = {**machine(options.commit), "flags": arguments, "streams": options.streams}

    def say(name: str, values: Any) -> None:
        found[name] = values
        print(json.dumps({name: values}), flush=True)
        save(found, options.out)

    with service(arguments) as url:
        say("beside_to_alone", measure(url, options, say))
    finish(found, options.out)


if __name__ == "__main__":
    main()
