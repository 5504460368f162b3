"""HTTP load clients: plain sockets on a selector, many connections per process."""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

START_S = 60.0
"""Maximum time for all client processes to start."""
WORDS = "the river ran past a small town where people met to talk about weather and bread".split()


@dataclass
class Load:
    route: str
    concurrency: int
    rounds: int
    rows: int
    max_tokens: int
    prompt_words: int
    chunk_size: int
    stream: bool
    password: str

    def prompts(self, client: int) -> list[str]:
        """Return the prompts of one request; each client has different ones."""
        words = [WORDS[(client + n) % len(WORDS)] for n in range(self.prompt_words)]
        return [f"User: {client}.{row} {' '.join(words)}\n\nAssistant:" for row in range(self.rows)]


def native_body(load: Load, client: int) -> dict[str, Any]:
    return {
        "contents": load.prompts(client),
        "max_tokens": load.max_tokens,
        "stop_tokens": [],
        "ignore_eos": True,
        "stream": load.stream,
        "chunk_size": load.chunk_size,
        "password": load.password,
    }


def openai_chat_body(load: Load, client: int) -> dict[str, Any]:
    """Return the body for OpenAI's chat route: one conversation, `rows` answers."""
    message = {"role": "user", "content": load.prompts(client)[0]}
    body = {"model": "rwkv7", "messages": [message], "n": load.rows, "max_tokens": load.max_tokens}
    return {**body, "stop_tokens": [], "stream": load.stream, "chunk_size": load.chunk_size, "ignore_eos": True} | {
        "password": load.password
    }


def translate_body(load: Load, client: int) -> dict[str, Any]:
    """Return the body for the translation route; every text is new."""
    texts = [f"{time.time_ns()} {prompt}" for prompt in load.prompts(client)]
    return {"source_lang": "en", "target_lang": "zh-CN", "text_list": texts, "password": load.password}


BODIES: dict[str, Callable[[Load, int], dict[str, Any]]] = {
    "/openai/v1/chat/completions": openai_chat_body,
    "/translate/v1/batch-translate": translate_body,
}
MARKERS = {"/openai/v1/chat/completions": b'"delta":{"content"'}
"""Bytes that mark new text in a stream; `"content"` on the other routes."""


@dataclass
class Connection:
    request: bytes
    connection: socket.socket
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tail: bytes = b""
    head_seen: bool = False
    failed: str = ""

    def send(self) -> None:
        self.connection.sendall(self.request)
        self.connection.setblocking(False)
        self.sent = time.perf_counter()

    def on_data(self, piece: bytes, marker: bytes) -> None:
        now = time.perf_counter()
        if not self.head_seen:
            self.head_seen = True
            if not piece.startswith(b"HTTP/1.1 200"):
                self.failed = piece[:300].decode("latin-1")
        if b'"error"' in piece:
            self.failed = piece[:300].decode("latin-1")
        if marker in piece:
            if self.first:
                self.gaps.append(now - self.last)
            else:
                self.first = now - self.sent
            self.last = now
        self.tail = (self.tail + piece)[-40:]


def _request(load: Load, host: str, client: int) -> bytes:
    body = json.dumps(BODIES.get(load.route, native_body)(load, client)).encode()
    head = f"POST {load.route} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    if load.password:
        head += f"Authorization: Bearer {load.password}\r\n"
    return head.encode() + b"\r\n" + body


def _open(host: str, port: int, request: bytes) -> Connection:
    return Connection(request, socket.create_connection((host, port)))


def drive(load: Load, host: str, port: int, numbers: list[int], results: Any, barrier: Any = None) -> None:
    """Run some clients to their end on one selector. Their first connections are open when the clock starts.

    Puts (start, end, CPU seconds, figures of the connections) into `results`. `barrier`: makes several processes start
    at the same time.
    """
    selector = selectors.DefaultSelector()
    marker = MARKERS.get(load.route, b'"content"') if load.stream else b"}"
    rounds = dict.fromkeys(numbers, load.rounds - 1)
    opened = [_open(host, port, _request(load, host, number)) for number in numbers]
    for number, open_connection in zip(numbers, opened, strict=True):
        selector.register(open_connection.connection, selectors.EVENT_READ, (number, open_connection))
    if barrier is not None:
        barrier.wait(START_S)
    started, used = time.perf_counter(), time.process_time()
    for open_connection in opened:
        open_connection.send()
    done: list[Connection] = []
    while selector.get_map():
        for key, _ in selector.select():
            number, open_connection = key.data
            piece = open_connection.connection.recv(262144)
            if piece:
                open_connection.on_data(piece, marker)
                continue
            selector.unregister(open_connection.connection)
            open_connection.connection.close()
            done.append(open_connection)
            if load.stream and not open_connection.failed and b"[DONE]" not in open_connection.tail:
                open_connection.failed = "the stream ended without [DONE]"
            if rounds[number]:
                rounds[number] -= 1
                following = _open(host, port, _request(load, host, number))
                following.send()
                selector.register(following.connection, selectors.EVENT_READ, (number, following))
    ended = time.perf_counter()
    used = time.process_time() - used
    results.put((started, ended, used, [(one.first, one.gaps, one.failed) for one in done]))


def fetch(url: str, path: str, password: str) -> str:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {password}"} if password else {})
    with urllib.request.urlopen(request, timeout=30) as response:
        text: str = response.read().decode()
    return text


def served_tokens(url: str, password: str) -> float:
    """Return the tokens that the service has sent after its start."""
    lines = fetch(url, "/metrics", password).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("rwkv_completion_tokens_total"))


def over_http(load: Load, url: str, client_processes: int) -> dict[str, Any]:
    """Run the load once against a service. `clients_cpu_s` has one value per client process."""
    address = urllib.parse.urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    shares = [list(range(n, load.concurrency, client_processes)) for n in range(client_processes)]
    shares = [share for share in shares if share]
    barrier = spawn.Barrier(len(shares))
    drivers = [spawn.Process(target=drive, args=(load, host, port, share, results, barrier)) for share in shares]
    before = served_tokens(url, load.password)
    for driver in drivers:
        driver.start()
    shares_done = [results.get() for _ in drivers]
    for driver in drivers:
        driver.join()
    seconds = max(ended for _, ended, _, _ in shares_done) - min(started for started, _, _, _ in shares_done)
    figures = [figure for _, _, _, share in shares_done for figure in share]
    tokens = served_tokens(url, load.password) - before
    used = [used for _, _, used, _ in shares_done]
    return {"figures": figures, "tokens": tokens, "seconds": seconds, "clients_cpu_s": used}
