"""The requests of the chaos clients, and the answers that they accept."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.service import HEADERS, Disturbances

SESSIONS_PER_CLIENT = 3
MAX_UNANSWERED = 3
"""Unanswered turns after which a session is not used any more: each doubles its possible histories."""
_SYSTEM = "You are a helpful assistant that answers in one short line and never asks back. Number "
_ERROR = re.compile(r'"error":(?!\s*(null|""))')
"""An error in a body. Batches, responses and states have an empty one."""
_BATCHED = "/v1/chat/completions"
_BATCH_TIMEOUT_S = 100.0
_ENDED = ("completed", "failed", "expired", "cancelled")
_WORDS = ("red", "seven", "river", "whose", "Baum", "7", "sky", "天", "né")


@dataclass
class Turn:
    """One request, and its answer if there was one."""

    prompt: str
    seed: int
    text: str | None = None
    prompt_tokens: int = 0


@dataclass
class Conversation:
    """A session as its client knows it."""

    name: str
    branches: bool
    turns: list[Turn] = field(default_factory=list)
    dialogue: int = 0
    deleted: bool = False
    delete_confirmed: bool = False
    """Whether the delete was acknowledged."""

    @property
    def unanswered(self) -> int:
        """Number of turns that may or may not be stored."""
        return sum(turn.text is None for turn in self.turns)

    @property
    def is_finished(self) -> bool:
        """Whether the session gets no more turns."""
        unanswered = bool(self.unanswered)
        return self.deleted or self.unanswered > MAX_UNANSWERED or (unanswered and self.turns[-1].text is not None)


def send_turn(client: httpx.Client, url: str, talk: Conversation, turn: Turn, name: str) -> None:
    """Send one turn and fill in its answer. Raises httpx.HTTPError if there was none."""
    body: dict[str, Any] = {
        "contents": [turn.prompt],
        "session_id": name,
        "max_tokens": 6,
        "stop_tokens": [],
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": turn.seed,
        "use_prefix_cache": False,
        "ignore_eos": True,
    }
    path = "/state/chat/completions"
    if talk.branches:
        path, body["dialogue_idx"] = "/multi_state/chat/completions", talk.dialogue
    reply = client.post(url + path, json=body)
    reply.raise_for_status()
    answer = reply.json()
    if "error" in answer:  # an error after the status was sent
        raise httpx.HTTPStatusError(str(answer["error"]), request=reply.request, response=reply)
    turn.prompt_tokens = int(answer["usage"]["prompt_tokens"])
    turn.text = str(answer["choices"][0]["message"]["content"])
    if talk.branches:
        talk.dialogue = int(answer["dialogue_idx"])


@dataclass
class Findings:
    answers: Counter[str] = field(default_factory=Counter)
    """by request kind and status"""
    unexplained: list[str] = field(default_factory=list)
    acknowledged: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, status: object, excuse: bool, detail: str) -> None:
        with self.lock:
            self.answers[f"{what} {status}"] += 1
            if not excuse:
                self.unexplained.append(f"{what}: {status} {detail[:300]}")


class Client(threading.Thread):
    """Sends random requests until it is stopped; pauses while `gate` is cleared."""

    def __init__(
        self,
        url: str,
        number: int,
        disturbances: Disturbances,
        findings: Findings,
        gate: threading.Event,
        pause_s: float = 0.0,
    ) -> None:
        """`pause_s`: mean pause after a request."""
        super().__init__(name=f"client-{number}", daemon=True)
        self.talks: list[Conversation] = []
        self.is_waiting = threading.Event()
        self.stopping = False
        self._url = url
        self._number = number
        self._rng = random.Random(number)
        self._disturbances = disturbances
        self._findings = findings
        self._gate = gate
        self._pause_s = pause_s
        self._names = itertools.count()
        self._files: list[tuple[bytes, int]] = []

    def run(self) -> None:
        """Send one request after another. Records an error of this program as unexplained."""
        try:
            self._send_requests()
        except Exception as error:
            self._findings.note("client", "ended", False, repr(error))
            self.is_waiting.set()
            raise

    def _send_requests(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, verify=False, headers=HEADERS) as client:
            while not self.stopping:
                if not self._gate.is_set():
                    self.is_waiting.set()
                    self._gate.wait()
                    self.is_waiting.clear()
                    continue
                self._one(client)
                if self._pause_s:
                    time.sleep(self._rng.expovariate(1 / self._pause_s))

    def _one(self, client: httpx.Client) -> None:
        chosen: Callable[[httpx.Client], None] = self._rng.choices(
            (
                self._turn,
                self._rows,
                self._disconnect,
                self._send_mistake,
                self._read,
                self._delete_session,
                self._export,
                self._import,
                self._batch,
            ),
            (30, 25, 8, 8, 6, 2, 4, 4, 1),
        )[0]
        chosen(client)

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(count))

    # Requests that must succeed ------------------------------------------------------------------------------

    def _send(self, what: str, fine: tuple[int, ...], send: Callable[[], httpx.Response]) -> httpx.Response | None:
        """Return the answer if its status is one of `fine`; otherwise record it and return None."""
        began = time.monotonic()
        try:
            response = send()
        except httpx.HTTPError as error:
            excuse = self._disturbances.explains(began, time.monotonic())
            self._findings.note(what, type(error).__name__, excuse, str(error))
            return None
        body = response.text[-400:] if "text" in response.headers.get("content-type", "json") else response.text[:400]
        failed = response.status_code == 200 and _ERROR.search(body) is not None
        status: object = f"{response.status_code} with an error" if failed else response.status_code
        right = response.status_code in fine and not failed
        is_overloaded = response.status_code == 429 and (
            "queue is full" in body or "retry in 1 s" in body or "try again in a moment" in body
        )
        excuse = right or is_overloaded or self._disturbances.explains(began, time.monotonic())
        self._findings.note(what, status, excuse, body)
        return response if right else None

    def _post(self, client: httpx.Client, path: str, body: Any, *fine: int) -> httpx.Response | None:
        return self._send(path, fine or (200,), lambda: client.post(path, json=body))

    def _rows(self, client: httpx.Client) -> None:
        rng = self._rng
        prompts = [f"{_SYSTEM}{rng.randrange(6)}. {self._words(8)}\n\nUser: {self._words(4)}\n\nAssistant:"]
        prompts *= rng.choice((1, 1, 2, 5))
        common = {"max_tokens": rng.choice((1, 4, 16)), "stream": rng.random() < 0.5, "timeout_s": 60}
        message = {"role": "user", "content": prompts[0]}
        choices: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"contents": prompts}),
            ("/v1/chat/completions", {"messages": [message]}),
            ("/v2/chat/completions", {"contents": prompts}),
            ("/big_batch/completions", {"contents": prompts, "stream": True}),
            ("/FIM/v1/batch-FIM", {"prefix": prompts, "suffix": ["end"] * len(prompts)}),
            ("/openai/v1/chat/completions", {"messages": [message], "n": rng.choice((1, 3))}),
            ("/openai/v1/completions", {"prompt": prompts, "n": rng.choice((1, 2)), "stop": ["red", "\n\n"]}),
            ("/v1/completions", {"prompt": prompts}),
            ("/openai/v1/responses", {"input": prompts[0]}),
            ("/v1/chat/completions", {"contents": prompts, "choice": ["red", f"seven {rng.randrange(9)}"]}),
            ("/v1/chat/completions", {"contents": prompts, "state": "poet"}),
            ("/v1/chat/completions", {"contents": prompts, "adapter": "pupil"}),
        ]
        path, body = rng.choice(choices)
        self._post(client, path, {**common, "model": "rwkv7", **body})
        if rng.random() < 0.2:
            # Few texts, so the cache of translations is full before the quiet part.
            text = f"{rng.choice(_WORDS)} {rng.randrange(50)}"
            texts = {"source_lang": "en", "target_lang": "zh-CN", "text_list": [text], "timeout_s": 100}
            self._post(client, "/translate/v1/batch-translate", texts)
            self._post(client, "/v1/score", {"contents": prompts, "candidates": [" red", " river"]})

    def _batch(self, client: httpx.Client) -> None:
        """Upload lines, wait for their answers, and delete the files."""
        count = self._rng.choice((1, 10, 50))
        body = {"messages": [{"role": "user", "content": self._words(4)}], "max_tokens": 4}
        lines = [{"custom_id": f"{i}", "method": "POST", "url": _BATCHED, "body": body} for i in range(count)]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        files, path = {"file": ("lines.jsonl", content)}, "/openai/v1/files"
        uploaded = self._send(path, (200,), lambda: client.post(path, data={"purpose": "batch"}, files=files))
        if uploaded is None:
            return
        file = uploaded.json()["id"]
        made = self._post(client, "/openai/v1/batches", {"input_file_id": file, "endpoint": _BATCHED})
        if made is not None:
            began, batch = time.monotonic(), made.json()
            path = f"/openai/v1/batches/{batch['id']}"
            while batch["status"] not in _ENDED and time.monotonic() < began + _BATCH_TIMEOUT_S:
                time.sleep(0.5)
                asked = self._send("batch", (200,), lambda: client.get(path))
                batch = batch if asked is None else asked.json()
            excuse = batch["status"] == "completed" and batch["request_counts"]["completed"] == count
            excuse = excuse or self._disturbances.explains(began, time.monotonic())
            self._findings.note("batch ended", batch["status"], excuse, json.dumps(batch))
            for name in ("output_file_id", "error_file_id"):
                self._delete_file(client, batch.get(name))
        self._delete_file(client, file)

    def _delete_file(self, client: httpx.Client, file: str | None) -> None:
        if file is not None:
            self._send("file content", (200,), lambda: client.get(f"/openai/v1/files/{file}/content"))
            self._send("file deleted", (200,), lambda: client.delete(f"/openai/v1/files/{file}"))

    def _read(self, client: httpx.Client) -> None:
        path = self._rng.choice(("/status", "/metrics", "/healthz", "/v1/models", "/openapi.json", "/docs", "/readyz"))
        self._send(path, (200,), lambda: client.get(path))
        self._post(client, "/state/status", {"limit": 5})
        self._post(client, "/v1/tokens/count", {"text": self._words(20)})

    def _disconnect(self, client: httpx.Client) -> None:
        body = {"contents": [self._words(12)], "max_tokens": 400, "stream": True, "ignore_eos": True, "timeout_s": 60}
        began = time.monotonic()
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for _ in zip(response.iter_raw(), range(self._rng.randrange(3)), strict=False):
                    pass
            self._findings.note("left", response.status_code, True, "")
        except httpx.HTTPError as error:
            excuse = self._disturbances.explains(began, time.monotonic())
            self._findings.note("left", type(error).__name__, excuse, str(error))

    def _send_mistake(self, client: httpx.Client) -> None:
        """Send an invalid request and check its status."""
        path = self._rng.choice(("/v1/chat/completions", "/state/chat/completions", "/openai/v1/chat/completions"))
        body, fine = self._rng.choice(
            [
                (b"{", (400,)),
                (b"[]", (422, 400)),
                (b'{"contents": [1, 2]}', (422, 400)),
                (b'{"contents": ["x"], "messages": "y", "max_tokens": -5}', (422, 400)),
                (b"\xff\xfe", (400,)),
                (json.dumps({"contents": ["x"], "top_p": 7, "messages": [{"role": "god"}]}).encode(), (422, 400)),
            ]
        )
        self._send("mistakes", fine, lambda: client.post(path, content=body))
        self._send("no such path", (404, 405), lambda: client.get(f"/{self._words(1)}/x"))

    # Sessions ------------------------------------------------------------------------------------------------

    def _talk(self) -> Conversation:
        open_talks = [talk for talk in self.talks if not talk.is_finished]
        while len(open_talks) < SESSIONS_PER_CLIENT:
            talk = Conversation(f"chaos {self._number}.{next(self._names)}", branches=self._rng.random() < 0.25)
            self.talks.append(talk)
            open_talks.append(talk)
        return self._rng.choice(open_talks)

    def _turn(self, client: httpx.Client) -> None:
        talk = self._talk()
        turn = Turn(f"User: {self._words(6)}\n\nAssistant:", self._rng.randrange(1 << 30))
        talk.turns.append(turn)

        def send() -> httpx.Response:
            try:
                send_turn(client, "", talk, turn, talk.name)
            except httpx.HTTPStatusError as error:
                return error.response
            return httpx.Response(200, text="")

        answer = self._send("turn", (200,), send)
        with self._findings.lock:
            self._findings.acknowledged += answer is not None

    def _delete_session(self, client: httpx.Client) -> None:
        talk = self._talk()
        if talk.turns and not talk.unanswered:
            talk.deleted = True
            talk.delete_confirmed = self._post(client, "/state/delete", {"session_id": talk.name}) is not None

    def _stored_session(self) -> Conversation | None:
        """Return a session of this client that is stored for certain."""
        kept = [t for t in self.talks if not t.deleted and not t.branches and not t.unanswered and t.turns]
        return self._rng.choice(kept) if kept else None

    def _export(self, client: httpx.Client) -> None:
        talk = self._stored_session()
        if talk is not None:
            path = "/state/export"
            answer = self._send(path, (200,), lambda: client.get(path, params={"session_id": talk.name}))
            if answer is not None:
                self._files = [*self._files[-2:], (answer.content, len(talk.turns))]

    def _import(self, client: httpx.Client) -> None:
        """Import an exported file, intact or damaged."""
        if not self._files:
            return
        content, _ = self._rng.choice(self._files)
        name, damaged = f"brought {self._number}.{next(self._names)}", self._rng.random() < 0.6
        if damaged:
            content = _damaged(content, self._rng)
        fine = (400, 422) if damaged else (200,)
        what = "damaged import" if damaged else "import"
        answer = self._send(
            what, fine, lambda: client.post("/state/import", params={"session_id": name}, content=content)
        )
        if answer is not None and not damaged:
            body = {"contents": ["User: and?\n\nAssistant:"], "session_id": name, "max_tokens": 2}
            self._post(client, "/state/chat/completions", body)
            self._post(client, "/state/delete", {"session_id": name})


def _damaged(content: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return content[: rng.randrange(1, len(content))]
    if kind == 1:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return rng.randbytes(rng.randrange(1, 5000))
    return (1 << 60).to_bytes(8, "little") + content[8:]


def stop(clients: list[Client], gate: threading.Event) -> None:
    """Stop all clients; each finishes its current request."""
    for client in clients:
        client.stopping = True
    gate.set()
    for client in clients:
        with contextlib.suppress(RuntimeError):
            client.join(150)
