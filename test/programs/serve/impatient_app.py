"""The service with the fake engine; a hanging HTTP worker is noticed soon."""

from __future__ import annotations

import os
import sys

from app import Supervisor, log_style
from programs.serve import http_workers
from programs.settings import parse_settings
from rwkv_batch.ipc.process import set_up_logging

if __name__ == "__main__":
    http_workers.HANG_S, http_workers._LOOK_S = 5.0, 0.1
    settings = parse_settings(sys.argv[1:], os.environ)
    set_up_logging("supervisor", log_style(settings))
    sys.exit(Supervisor(settings, "test.fake_engine:FakeEngine").run())
