"""The service with the fake engine: same supervisor, same HTTP workers, no model."""

from __future__ import annotations

import os
import sys

from app import Supervisor, log_style
from programs.settings import parse_settings
from rwkv_batch.ipc.process import set_up_logging

if __name__ == "__main__":
    settings = parse_settings(sys.argv[1:], os.environ)
    set_up_logging("supervisor", log_style(settings))
    sys.exit(Supervisor(settings, "test.fake_engine:FakeEngine").run())
