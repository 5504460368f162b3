"""What the clients of chaos ask for, and which answers they may get."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.crash import Conversation, Turn, ask
from bench.chaos.disturbances import Disturbances

SESSIONS_PER_CLIENT = 3
_SYSTEM = "You are a helpful assistant that answers in one short line and never asks back. Number "
_WORDS = ("red", "seven", "river", "whose", "Baum", "7", "sky", "天", "né")


@dataclass
class Findings:
    """What all clients saw together."""

    answers: Counter[str] = field(default_factory=Counter)
    """by what was asked and the status"""
    unexplained: list[str] = field(default_factory=list)
    acknowledged: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, status: object, excuse: bool, detail: str) -> None:
        """One request that has ended."""
        with self.lock:
            self.answers[f"{what} {status}"] += 1
            if not excuse:
                self.unexplained.append(f"{what}: {status} {detail[:300]}")


class Client(threading.Thread):
    """One client: asks for this and that until told to stop; `gate` holds it back while others measure."""

    def __init__(
        self, url: str, number: int, disturbances: Disturbances, findings: Findings, gate: threading.Event
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.talks: list[Conversation] = []
        self.is_waiting = threading.Event()
        self.stopping = False
        self._url = url
        self._number = number
        self._draw = random.Random(number)
        self._disturbances = disturbances
        self._findings = findings
        self._gate = gate
        self._names = itertools.count()
        self._files: list[tuple[bytes, int]] = []

    def run(self) -> None:
        """One request after the other. A fault of this program is told as what nothing explains."""
        try:
            self._ask_on()
        except Exception as error:
            self._findings.note("client", "ended", False, repr(error))
            self.is_waiting.set()
            raise

    def _ask_on(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, verify=False) as client:
            while not self.stopping:
                if not self._gate.is_set():
                    self.is_waiting.set()
                    self._gate.wait()
                    self.is_waiting.clear()
                    continue
                self._one(client)

    def _one(self, client: httpx.Client) -> None:
        chosen: Callable[[httpx.Client], None] = self._draw.choices(
            (
                self._turn,
                self._rows,
                self._leave,
                self._wrong,
                self._read,
                self._delete_session,
                self._export,
                self._import,
            ),
            (30, 25, 8, 8, 6, 2, 4, 4),
        )[0]
        chosen(client)

    def _words(self, count: int) -> str:
        return " ".join(self._draw.choice(_WORDS) for _ in range(count))

    # Requests that must succeed ------------------------------------------------------------------------------

    def _send(self, what: str, fine: tuple[int, ...], send: Callable[[], httpx.Response]) -> httpx.Response | None:
        """The answer, if it is one of the statuses that the request should get; else None and noted."""
        began = time.monotonic()
        try:
            response = send()
        except httpx.HTTPError as error:
            excuse = self._disturbances.explains(began, time.monotonic())
            self._findings.note(what, type(error).__name__, excuse, str(error))
            return None
        body = response.text[-400:] if "text" in response.headers.get("content-type", "json") else response.text[:400]
        failed = '"error"' in body and response.status_code == 200
        status: object = f"{response.status_code} with an error" if failed else response.status_code
        right = response.status_code in fine and not failed
        crowded = response.status_code == 429 and ("queue is full" in body or "try again in a moment" in body)
        excuse = right or crowded or self._disturbances.explains(began, time.monotonic())
        self._findings.note(what, status, excuse, body)
        return response if right else None

    def _post(self, client: httpx.Client, path: str, body: Any, *fine: int) -> httpx.Response | None:
        return self._send(path, fine or (200,), lambda: client.post(path, json=body))

    def _rows(self, client: httpx.Client) -> None:
        draw = self._draw
        prompts = [f"{_SYSTEM}{draw.randrange(6)}. {self._words(8)}\n\nUser: {self._words(4)}\n\nAssistant:"]
        prompts *= draw.choice((1, 1, 2, 5))
        common = {"max_tokens": draw.choice((1, 4, 16)), "stream": draw.random() < 0.5, "timeout_s": 60}
        message = {"role": "user", "content": prompts[0]}
        path, body = draw.choice(
            [
                ("/v1/chat/completions", {"contents": prompts}),
                ("/v1/chat/completions", {"messages": [message]}),
                ("/v2/chat/completions", {"contents": prompts}),
                ("/big_batch/completions", {"contents": prompts, "stream": True}),
                ("/FIM/v1/batch-FIM", {"prefix": prompts, "suffix": ["end"] * len(prompts)}),
                ("/openai/v1/chat/completions", {"messages": [message], "n": draw.choice((1, 3))}),
                ("/openai/v1/completions", {"prompt": prompts, "n": draw.choice((1, 2)), "stop": ["red", "\n\n"]}),
                ("/v1/completions", {"prompt": prompts}),
            ]
        )
        self._post(client, path, {**common, "model": "rwkv7", **body})
        if draw.random() < 0.2:
            texts = {"source_lang": "en", "target_lang": "zh-CN", "text_list": [self._words(5)], "timeout_s": 100}
            self._post(client, "/translate/v1/batch-translate", texts)

    def _read(self, client: httpx.Client) -> None:
        path = self._draw.choice(("/status", "/metrics", "/healthz", "/v1/models", "/openapi.json", "/docs", "/readyz"))
        self._send(path, (200,), lambda: client.get(path))
        self._post(client, "/state/status", {"limit": 5})
        self._post(client, "/v1/tokens/count", {"text": self._words(20)})

    def _leave(self, client: httpx.Client) -> None:
        """A client that goes away in the middle of its answer."""
        body = {"contents": [self._words(12)], "max_tokens": 400, "stream": True, "ignore_eos": True, "timeout_s": 60}
        began = time.monotonic()
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for _ in zip(response.iter_raw(), range(self._draw.randrange(3)), strict=False):
                    pass
            self._findings.note("left", response.status_code, True, "")
        except httpx.HTTPError as error:
            excuse = self._disturbances.explains(began, time.monotonic())
            self._findings.note("left", type(error).__name__, excuse, str(error))

    def _wrong(self, client: httpx.Client) -> None:
        """Mistakes of a client, each with its status."""
        path = self._draw.choice(("/v1/chat/completions", "/state/chat/completions", "/openai/v1/chat/completions"))
        body, fine = self._draw.choice(
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
        going = [talk for talk in self.talks if not talk.over]
        while len(going) < SESSIONS_PER_CLIENT:
            talk = Conversation(f"chaos {self._number}.{next(self._names)}", branches=self._draw.random() < 0.25)
            self.talks.append(talk)
            going.append(talk)
        return self._draw.choice(going)

    def _turn(self, client: httpx.Client) -> None:
        talk = self._talk()
        turn = Turn(f"User: {self._words(6)}\n\nAssistant:", self._draw.randrange(1 << 30))
        talk.turns.append(turn)

        def send() -> httpx.Response:
            try:
                ask(client, "", talk, turn, talk.name)
            except httpx.HTTPStatusError as error:
                return error.response
            return httpx.Response(200, text="")

        answer = self._send("turn", (200,), send)
        with self._findings.lock:
            self._findings.acknowledged += answer is not None

    def _delete_session(self, client: httpx.Client) -> None:
        talk = self._talk()
        if talk.turns and not talk.unsure:
            talk.deleted = True
            talk.gone = self._post(client, "/state/delete", {"session_id": talk.name}) is not None

    def _kept(self) -> Conversation | None:
        """A session of its own that is there for sure."""
        kept = [t for t in self.talks if not t.deleted and not t.branches and not t.unsure and t.turns]
        return self._draw.choice(kept) if kept else None

    def _export(self, client: httpx.Client) -> None:
        talk = self._kept()
        if talk is not None:
            path = "/state/export"
            answer = self._send(path, (200,), lambda: client.get(path, params={"session_id": talk.name}))
            if answer is not None:
                self._files = [*self._files[-2:], (answer.content, len(talk.turns))]

    def _import(self, client: httpx.Client) -> None:
        """A file that was exported, whole or damaged."""
        if not self._files:
            return
        content, _ = self._draw.choice(self._files)
        name, damaged = f"brought {self._number}.{next(self._names)}", self._draw.random() < 0.6
        if damaged:
            content = _damaged(content, self._draw)
        fine = (400, 422) if damaged else (200,)
        what = "damaged import" if damaged else "import"
        answer = self._send(
            what, fine, lambda: client.post("/state/import", params={"session_id": name}, content=content)
        )
        if answer is not None and not damaged:
            body = {"contents": ["User: and?\n\nAssistant:"], "session_id": name, "max_tokens": 2}
            self._post(client, "/state/chat/completions", body)
            self._post(client, "/state/delete", {"session_id": name})


def _damaged(content: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(4)
    if kind == 0:
        return content[: draw.randrange(1, len(content))]
    if kind == 1:
        at = draw.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    if kind == 2:
        return draw.randbytes(draw.randrange(1, 5000))
    return (1 << 60).to_bytes(8, "little") + content[8:]


def stop(clients: list[Client], gate: threading.Event) -> None:
    """End all clients; each finishes the request it is at."""
    for client in clients:
        client.stopping = True
    gate.set()
    for client in clients:
        with contextlib.suppress(RuntimeError):
            client.join(150)
