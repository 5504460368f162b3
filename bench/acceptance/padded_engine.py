"""The real engine with steps of a set length, RWKV_BENCH_STEP_MS: as a GPU's, whatever else this machine's cores do."""

from __future__ import annotations

import os
import sys
import time

from app import Supervisor, log_style
from rwkv_batch.engine import Engine
from rwkv_batch.ipc.process import set_up_logging
from settings import parse_settings
from settings.model_file import with_model


class PaddedEngine(Engine):
    """See above."""

    def step(self) -> bool:
        """See Engine."""
        begun = time.monotonic()
        has_worked = super().step()
        if has_worked:
            time.sleep(max(0.0, begun + float(os.environ.get("RWKV_BENCH_STEP_MS", "40")) / 1e3 - time.monotonic()))
        return has_worked


if __name__ == "__main__":
    settings = with_model(parse_settings(sys.argv[1:], os.environ))
    set_up_logging("supervisor", log_style(settings))
    sys.exit(Supervisor(settings, "bench.acceptance.padded_engine:PaddedEngine").run())
