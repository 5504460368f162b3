"""Errors in OpenAI's own package: a wrong password, a full queue."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from openai import OpenAI

from test.routes.test_openai_routes import chat
from test.serving import Service


def test_the_password_and_the_queue(tiny_model: Path, tmp_path: Path) -> None:
    """At both base URLs."""
    flags = ("--model-path", str(tiny_model), "--http-workers", "1", "--max-waiting-rows", "8")
    running = Service(tmp_path, *flags, RWKV_PASSWORD="s3cret")
    running.headers = {"Authorization": "Bearer s3cret"}
    try:
        running.wait_ready()
        for base in (f"{running.url}/openai/v1", f"{running.url}/v1"):
            with OpenAI(base_url=base, api_key="wrong", max_retries=0) as unauthorized:
                for refused in (lambda one: chat(one), lambda one: one.models.list()):
                    with pytest.raises(openai.AuthenticationError) as refusal:
                        refused(unauthorized)
                    assert refusal.value.code == "invalid_api_key"
            with OpenAI(base_url=base, api_key="s3cret", max_retries=0) as authorized:
                assert chat(authorized).choices
                with pytest.raises(openai.RateLimitError) as full:
                    authorized.completions.create(model="rwkv7", prompt="a", n=64)
                assert int(full.value.response.headers["retry-after"]) >= 1
    finally:
        running.close()
