"""Memory that each kind of request leaves behind. Measures one kind at a time.

    python -m bench.growth [--count 2000] [--kinds row,stream,...] [--clients 4] [--model FILE] [--out FILE]

`app.py` runs with the small caches of `bench.chaos` and one HTTP worker. Each kind gets `count` requests. The anonymous
memory of the engine, the HTTP worker and the batches is sampled after every twelfth of them. Prints per process:
- the Theil-Sen slope of the last two thirds, in bytes per request;
- the growth in the first third, in which pools, arenas and caches fill up.

Bound: the allocator gives and takes whole pages, so a slope of a few bytes over few requests means nothing. The last
line is JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.__main__ import TINY
from bench.chaos.health import figures_of, names_of
from bench.chaos.reloads import Files
from bench.chaos.service import HEADERS, PASSWORD, Service
from bench.tools.record import Arguments, finish, origin

PARTS = 12
CHAT = "/v1/chat/completions"
_LANGUAGES = {"source_lang": "en", "target_lang": "zh-CN", "timeout_s": 60}
Ask = Callable[[httpx.Client, int], None]


def _post(path: str, body: Callable[[int], Any]) -> Ask:
    return lambda client, n: _check_status(client.post(path, json=body(n)), 200)


def _get(path: str, status: int = 200) -> Ask:
    return lambda client, n: _check_status(client.get(path), status)


def _check_status(response: httpx.Response, status: int) -> None:
    if response.status_code != status:
        raise RuntimeError(f"{response.request.url}: {response.status_code} instead of {status}: {response.text[:300]}")


def _row(n: int, **fields: object) -> dict[str, object]:
    return {"contents": [f"User: {n}\n\nAssistant:"], "max_tokens": 1, "timeout_s": 60, **fields}


def _disconnect(client: httpx.Client, n: int) -> None:
    with client.stream("POST", CHAT, json=_row(n, max_tokens=400, stream=True, ignore_eos=True)) as response:
        next(response.iter_raw())


def _reload(client: httpx.Client, kind: str, name: str, file: str, **fields: object) -> None:
    """Load a tuned state or an adapter, use it and remove it."""
    _check_status(client.post(f"/v1/{kind}", json={"name": name, "file": file, **fields}), 200)
    _check_status(client.post(CHAT, json=_row(0, **{kind.removesuffix("s"): name})), 200)
    _check_status(client.delete(f"/v1/{kind}/{name}"), 200)


def _upload(client: httpx.Client, n: int) -> None:
    files = {"file": ("lines.jsonl", b'{"custom_id": "1"}\n')}
    uploaded = client.post("/openai/v1/files", data={"purpose": "batch"}, files=files)
    _check_status(uploaded, 200)
    _delete_file(client, uploaded.json()["id"])


def _delete_file(client: httpx.Client, file: str | None) -> None:
    if file is not None:
        _check_status(client.delete(f"/openai/v1/files/{file}"), 200)


def _batch(client: httpx.Client, n: int) -> None:
    """Upload lines, wait for their answers, and delete the files."""
    body = {"messages": [{"role": "user", "content": f"so {n}"}], "max_tokens": 1}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": body})
    files = {"file": ("lines.jsonl", f"{line}\n".encode())}
    uploaded = client.post("/openai/v1/files", data={"purpose": "batch"}, files=files)
    _check_status(uploaded, 200)
    made = client.post("/openai/v1/batches", json={"input_file_id": uploaded.json()["id"], "endpoint": CHAT})
    _check_status(made, 200)
    batch = made.json()
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(0.02)
        asked = client.get(f"/openai/v1/batches/{batch['id']}")
        _check_status(asked, 200)
        batch = asked.json()
    if batch["status"] != "completed":
        raise RuntimeError(f"the batch ended as {batch['status']}: {batch}")
    for name in ("input_file_id", "output_file_id"):
        _delete_file(client, batch[name])


def _turn_and_delete(client: httpx.Client, n: int, path: str = "/state/chat/completions") -> None:
    name = f"growth {n}"
    _check_status(client.post(path, json=_row(n, session_id=name)), 200)
    _check_status(client.post("/state/delete", json={"session_id": name}), 200)


def _export_and_import(client: httpx.Client, n: int, cut: int | None = None) -> None:
    """Export and import a session. `cut`: length of a truncated file, which the service rejects."""
    if n == 0:
        _check_status(client.post("/state/chat/completions", json=_row(n, session_id="carried")), 200)
    file = client.get("/state/export", params={"session_id": "carried"})
    _check_status(file, 200)
    brought = {"session_id": f"brought {n}"}
    answer = client.post("/state/import", params=brought, content=file.content[:cut])
    _check_status(answer, 200 if cut is None else 422)
    if cut is None:
        _check_status(client.post("/state/delete", json=brought), 200)


KINDS: dict[str, Ask] = {
    "no such path": _get("/none", 404),
    "mistake": lambda client, n: _check_status(client.post(CHAT, json=_row(n, max_tokens=-5)), 422),
    "tokens/count": _post("/v1/tokens/count", lambda n: {"text": f"so many words {n}"}),
    "status": _get("/status"),
    "metrics": _get("/metrics"),
    "row": _post(CHAT, _row),
    "stream": _post(CHAT, lambda n: _row(n, stream=True)),
    "new prompts": _post(CHAT, lambda n: _row(n, contents=[f"{n} red and blue " * 20])),
    "grammars": _post(CHAT, lambda n: _row(n, choice=["red", f"seven {n}"], max_tokens=4)),
    "translations": _post("/translate/v1/batch-translate", lambda n: {**_LANGUAGES, "text_list": [f"red {n}"]}),
    "rows with stops": _post(CHAT, lambda n: _row(n, contents=["a"] * 5, stop=[f"b{n}", "\n\n"], max_tokens=4)),
    "leave": _disconnect,
    "turn": _post("/state/chat/completions", lambda n: _row(n, session_id=f"one {n % 4}")),
    "turn and delete": _turn_and_delete,
    "branch and delete": lambda client, n: _turn_and_delete(client, n, "/multi_state/chat/completions"),
    "tuned state": lambda client, n: _reload(client, "states", f"state-{n}", "chinese.pth"),
    "adapter": lambda client, n: _reload(client, "adapters", f"adapter-{n}", "french.safetensors", scale=1),
    "batch file": _upload,
    "batch": _batch,
    "export and import": _export_and_import,
    "damaged import": lambda client, n: _export_and_import(client, n, 100),
}
SINGLE_CLIENT = {"export and import", "damaged import"}
"""Kinds for one client only: the service handles at most two files at once."""


def measure_growth(url: str, pids: dict[str, int], ask: Ask, count: int, clients: int) -> dict[str, Any]:
    """Return each process's memory growth over `count` requests of one kind."""
    numbers = itertools.count()
    points = [{name: _own(pid) for name, pid in pids.items()}]
    each = max(1, count // PARTS // clients)

    def part(client: httpx.Client) -> None:
        for _ in range(each):
            ask(client, next(numbers))

    connections = [httpx.Client(base_url=url, timeout=120, verify=False, headers=HEADERS) for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        for _ in range(PARTS):
            list(pool.map(part, connections))
            points.append({name: _own(pid) for name, pid in pids.items()})
    for client in connections:
        client.close()
    growth: dict[str, Any] = {"requests": PARTS * each * clients}
    for name in pids:
        late = [(i * each * clients, point[name]) for i, point in enumerate(points)][PARTS // 3 :]
        slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(late, 2)]
        first = points[PARTS // 3][name] - points[0][name]
        growth[name] = {"bytes_a_request": round(statistics.median(slopes), 1), "first_third_kib": first >> 10}
    return growth


def _own(pid: int) -> int:
    found = figures_of(pid)
    if found is None:
        raise RuntimeError(f"process {pid} has ended")
    return found.anonymous


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--model", default="", help="default: the built-in demo model")
    arguments = parser.parse_args()
    flags = [*TINY, "--http-workers=1", "--dtype=fp32", "--pp-devices=cpu", "--log-level=warning"]
    flags += ["--access-log=false", *(["--model-path", arguments.model] if arguments.model else [])]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        flags += [f"--password={PASSWORD}", *Files(Path(name)).arguments]
        service = Service(Path(name), *flags, state_db=Path(name) / "sessions.db")
        try:
            pids = {growth.partition("-")[0]: pid for pid, growth in names_of(service.url).items()}
            for kind in arguments.kinds.split(","):
                result[kind] = measure_growth(
                    service.url, pids, KINDS[kind], arguments.count, 1 if kind in SINGLE_CLIENT else arguments.clients
                )
                print(kind, json.dumps(result[kind]), flush=True)
        finally:
            service.stop()
    last = {"measure": "growth", **origin(arguments.commit), "clients": arguments.clients, "kinds": result}
    finish(last, arguments.out)


if __name__ == "__main__":
    main()
