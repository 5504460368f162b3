"""Services with the fake engine, and clients of services, that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from openai import OpenAI

from test.programs.batch.runs import fake_service
from test.serving import Service

PASSWORD = "a secret"
ANNA, BERT = "key-of-anna", "key-of-bert"
KEYS = f'[[key]]\nname = "anna"\nkey = "{ANNA}"\n[[key]]\nname = "bert"\nkey = "{BERT}"\n'


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that refuses unknown fields and unknown models."""
    flags = ("--strict-fields", "true", "--strict-model", "true", "--http-workers", "1")
    with closing(fake_service(tmp_path_factory.mktemp("strict"), *flags)) as running:
        yield running


@pytest.fixture(scope="session")
def keyed_fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with one HTTP worker, a password, and the keys of Anna and Bert."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.toml").write_text(KEYS, encoding="utf-8")
    flags = ("--keys-file", str(folder / "keys.toml"), "--password", PASSWORD, "--http-workers", "1")
    with closing(fake_service(folder, *flags, password=PASSWORD)) as running:
        yield running


def openai_client(service: Service, base: str = "/openai/v1", key: str = "none") -> OpenAI:
    return OpenAI(base_url=service.url + base, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[OpenAI]:
    with openai_client(service) as made:
        yield made


@pytest.fixture(scope="session")
def echo_client(fake: Service) -> Iterator[OpenAI]:
    """A client of the service that answers with the last user message, without its "say"."""
    with openai_client(fake) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def request(service: Service, method: str, path: str, key: str = ANNA, **options: Any) -> httpx.Response:
    return service.request(method, path, headers=bearer(key), **options)
