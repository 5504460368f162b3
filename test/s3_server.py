"""An S3-compatible server for tests: moto's, in a thread of this process."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

KEY, SECRET = "AKIDEXAMPLE", "topsecretkey"


def unavailable_reason() -> str | None:
    """Return why no server can run here, or None."""
    missing = [name for name in ("moto", "flask", "flask_cors", "obstore") if find_spec(name) is None]
    return f"{' and '.join(missing)} cannot be found" if missing else None


class ObjectServer:
    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = "http://{}:{}".format(*self._server.get_host_and_port())
        self._number = 0

    def bucket(self) -> str:
        self._number += 1
        name = f"states{self._number}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=60).close()
        return f"s3://{name}/some/prefix?endpoint={self.endpoint}"

    def close(self) -> None:
        self._server.stop()


@contextmanager
def run_s3_server() -> Iterator[ObjectServer]:
    """Run a server whose keys are in the environment."""
    server = ObjectServer()
    before = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    try:
        yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        server.close()
