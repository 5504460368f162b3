"""Reloads keys, tuned states, adapters and models of the running service. Uses each of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.traffic import Client
from demo.random_weights import write_random_model

TUNED = Path(__file__).resolve().parents[2] / "demo" / "tuned"
PAUSE_S = (3.0, 15.0)
"""Shortest and longest time between two reloads."""
KEYS_TIMEOUT_S = 30.0
MODEL_TIMEOUT_S = 110
SAME_ANSWERS = 12
"""Answers in a row after which every HTTP worker is taken to know the keys."""
CHAT = "/v1/chat/completions"


class Files:
    """The files that the service's flags name."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys.toml"
        self.models = folder / "models"
        shutil.copytree(TUNED, self.models)
        write_random_model(self.models / "small.safetensors", layers=2, width=64)
        self.write_keys("first")

    def write_keys(self, secret: str) -> None:
        """Write a keys file with one key, for the guest."""
        new = self.keys.with_suffix(".new")
        new.write_text(f'[[key]]\nname = "guest"\nkey = "key-of-the-{secret}"\nrows = 8\nrequests_per_minute = 600\n')
        new.replace(self.keys)

    @property
    def arguments(self) -> list[str]:
        named = [
            f"--state=poet={self.models / 'json.pth'}",
            f"--adapter-serve=pupil={self.models}/spanish.safetensors:1",
        ]
        return [f"--keys-file={self.keys}", f"--models-dir={self.models}", *named]


class Administrator(Client):
    """A client that reloads something after each pause."""

    supervisor: int
    files: Files

    def __init__(self, *arguments: Any, supervisor: int, files: Files, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.supervisor = supervisor
        self.files = files
        self._left: list[tuple[str, str]] = []
        """kinds and names whose removal was not acknowledged, because of a fault"""

    def _one(self, client: httpx.Client) -> None:
        until = time.monotonic() + self._rng.uniform(*PAUSE_S)
        while time.monotonic() < until and self._gate.is_set() and not self.stopping:
            time.sleep(0.2)
        if not self._gate.is_set():
            return
        for kind, name in self._left[:2]:
            self._left.remove((kind, name))
            self._remove(client, kind, name, 200, 404)
        reload: Callable[[httpx.Client], None] = self._rng.choices(
            (self._reload_keys, self._reload_state, self._reload_adapter, self._reload_model), (4, 4, 4, 1)
        )[0]
        reload(client)

    def _remove(self, client: httpx.Client, kind: str, name: str, *fine: int) -> None:
        if kind == "models":
            body = {"name": name, "wait_s": MODEL_TIMEOUT_S}
            answer = self._post(client, "/v1/models/unload", body, *fine)
        else:
            answer = self._send(f"remove {kind}", fine or (200,), lambda: client.delete(f"/v1/{kind}/{name}"))
        if answer is None:
            self._left.append((kind, name))

    def _use(self, client: httpx.Client, **fields: Any) -> None:
        body = {"contents": [f"User: {self._words(4)}\n\nAssistant:"], "max_tokens": 8, "timeout_s": 60, **fields}
        self._post(client, CHAT, body)

    # What is reloaded ----------------------------------------------------------------------------------------

    def _reload_keys(self, client: httpx.Client) -> None:
        """Replace the guest's key. All workers accept the new one, and refuse the old one, after some seconds."""
        secret, old = f"{next(self._names)}", self.files.keys.read_text().split('"')[3]
        self.files.write_keys(secret)
        os.kill(self.supervisor, signal.SIGHUP)
        new, began = f"key-of-the-{secret}", time.monotonic()
        is_known = self._all_answer(client, new, 200) and self._all_answer(client, old, 401)
        excuse = is_known or self._disturbances.explains(began, time.monotonic())
        self._findings.note("keys", "reloaded" if is_known else "not reloaded", excuse, f"{old} to {new}")
        headers = {"Authorization": f"Bearer {new}"}
        body = {"contents": [self._words(3)], "max_tokens": 4, "session_id": f"guest {secret}"}
        if is_known:
            path = "/state/chat/completions"
            self._send("guest", (200,), lambda: client.post(path, json=body, headers=headers))
            name = {"session_id": f"guest {secret}"}
            self._send("guest deletes", (200,), lambda: client.post("/state/delete", json=name, headers=headers))

    def _all_answer(self, client: httpx.Client, key: str, status: int) -> bool:
        """Wait until requests with the key have this status. A new connection reaches any worker."""
        same, until = 0, time.monotonic() + KEYS_TIMEOUT_S
        while same < SAME_ANSWERS and time.monotonic() < until:
            headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
            answer = None
            with contextlib.suppress(httpx.HTTPError):
                answer = client.get("/v1/models", headers=headers)
            same = same + 1 if answer is not None and answer.status_code == status else 0
            if not same:
                time.sleep(0.2)
        return same >= SAME_ANSWERS

    def _reload_state(self, client: httpx.Client) -> None:
        """Load, use and remove a tuned state and a mixture with it. Use one in a session, too."""
        name, mixture = f"state-{next(self._names)}", f"mixture-{next(self._names)}"
        if self._post(client, "/v1/states", {"name": name, "file": "chinese.pth"}) is None:
            self._left.append(("states", name))
            return
        self._use(client, state=name)
        members = [{"name": name, "weight": 2}, {"name": "poet", "weight": 1}]
        if self._post(client, "/v1/states", {"name": mixture, "states": members}) is not None:
            self._use(client, state=mixture)
        body = {"contents": ["User: one\n\nAssistant:"], "session_id": name, "max_tokens": 4, "state": name}
        self._post(client, "/state/chat/completions", body)
        self._post(client, "/state/delete", {"session_id": name}, 200, 404)
        self._remove(client, "states", mixture, 200, 404)
        self._remove(client, "states", name)

    def _reload_adapter(self, client: httpx.Client) -> None:
        name = f"adapter-{next(self._names)}"
        if self._post(client, "/v1/adapters", {"name": name, "file": "french.safetensors", "scale": 1}) is not None:
            self._use(client, adapter=name)
            self._remove(client, "adapters", name)
        else:
            self._left.append(("adapters", name))

    def _reload_model(self, client: httpx.Client) -> None:
        name = "another"  # always the same: each name has a database of its own
        if ("models", name) in self._left:
            return
        body = {"file": "small.safetensors", "name": name, "wait_s": MODEL_TIMEOUT_S}
        answer = self._post(client, "/v1/models/load", body)
        status = "lost" if answer is None else answer.json()["status"]
        self._findings.note("model", status, status != "failed", "" if answer is None else answer.text)
        if status == "ready":
            self._use(client, model=name)
            self._remove(client, "models", name)
        else:  # on a machine with much else to do it may still be loading
            self._left.append(("models", name))
