"""`--samplers` takes precedence over a route's preferred sampler."""

from __future__ import annotations

from pathlib import Path

from test.serving import Service

SHORT = {"max_tokens": 2}
REQUESTS = {
    "/v1/chat/completions": {"contents": ["a"]},
    "/v2/chat/completions": {"contents": ["a"]},
    "/big_batch/completions": {"contents": ["a"], "stream": False},
    "/FIM/v1/batch-FIM": {"prefix": ["a"], "suffix": ["b"]},
    "/state/chat/completions": {"contents": ["a"], "session_id": "s"},
    "/multi_state/chat/completions": {"contents": ["a"], "session_id": "m"},
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/openai/v1/completions": {"prompt": "a"},
}


def test_every_route_uses_the_configured_sampler(tmp_path: Path) -> None:
    service = Service(tmp_path, "--samplers", "naive", "--http-workers", "1")
    try:
        service.wait_ready()
        for path, body in REQUESTS.items():
            assert service.post(path, {**SHORT, **body}).status_code == 200, path
        used = service.status()["samplers"]["used"]
    finally:
        service.close()
    assert used == {"default": "naive", "flashinfer": "naive"}
