"""A web backend with one conversation per visitor. The service keeps each as a session, named by a cookie.

    python examples/web_backend.py --url http://127.0.0.1:8000 --port 8080
    curl -N -b jar -c jar http://127.0.0.1:8080/say -d "My name is Ada."
    curl -N -b jar -c jar http://127.0.0.1:8080/say -d "What is my name?"
    curl -b jar -X DELETE http://127.0.0.1:8080/say

The backend stores nothing and sends only the new message. After a restart, all conversations continue.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import AsyncIterator

from aiohttp import ClientSession, ClientTimeout, web

COOKIE = "conversation"
MAX_BYTES = 16_384
CLIENT = web.AppKey("client", ClientSession)
MAX_TOKENS = web.AppKey("max_tokens", int)


async def deltas(client: ClientSession, body: dict[str, object]) -> AsyncIterator[str]:
    """Yield the answer in pieces. Raises ValueError with the service's error."""
    async with client.post("/v1/chat/completions", json=body) as answer:
        if answer.status != web.HTTPOk.status_code:
            raise ValueError((await answer.json())["error"]["message"])
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content", "")


async def say(request: web.Request) -> web.StreamResponse:
    """Answer one message: plain text in, streamed plain text out."""
    session = request.cookies.get(COOKIE) or secrets.token_urlsafe(16)
    body = {
        "messages": [{"role": "user", "content": await request.text()}],
        "session_id": session,
        "max_tokens": request.app[MAX_TOKENS],
        "stream": True,
        "chunk_size": 4,
    }
    texts = deltas(request.app[CLIENT], body)
    try:
        first = await anext(texts, "")
    except ValueError as error:
        return web.Response(status=502, text=f"{error}\n")
    answer = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    answer.set_cookie(COOKIE, session, httponly=True, samesite="Lax")
    await answer.prepare(request)
    await answer.write(first.encode())
    async for text in texts:  # an error here closes the connection, so the visitor sees it
        await answer.write(text.encode())
    await answer.write(b"\n")
    return answer


async def forget(request: web.Request) -> web.Response:
    """Delete the visitor's session."""
    session = request.cookies.get(COOKIE)
    if session:
        async with request.app[CLIENT].post("/state/delete", json={"session_id": session}) as answer:
            await answer.read()
    gone = web.Response(status=204)
    gone.del_cookie(COOKIE)
    return gone


def backend(url: str, max_tokens: int) -> web.Application:
    """Return the aiohttp application."""
    app = web.Application(client_max_size=MAX_BYTES)
    app[MAX_TOKENS] = max_tokens

    async def with_client(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(url, timeout=ClientTimeout(total=None, sock_read=60)) as app[CLIENT]:
            yield

    app.cleanup_ctx.append(with_client)
    app.add_routes([web.post("/say", say), web.delete("/say", forget)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    web.run_app(backend(given.url, given.max_tokens), host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
