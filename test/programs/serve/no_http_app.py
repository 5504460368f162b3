"""A service whose HTTP workers cannot start."""

from __future__ import annotations

import os
import sys
from typing import Any

from app import Supervisor, log_style
from programs.settings import parse_settings
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import set_up_logging
from test.programs.serve import no_http_app


def broken(*arguments: Any) -> None:
    """An HTTP worker that reports why it cannot start."""
    arguments[-1].send(("failed", "no threads are left"))


if __name__ == "__main__":
    settings = parse_settings(sys.argv[1:], os.environ)
    set_up_logging("supervisor", log_style(settings))
    try:
        Supervisor(settings, "test.fake_engine:FakeEngine", no_http_app.broken).run()
    except StartupError as error:
        sys.exit(f"error: {error}")
