"""The command `python -m state_pool.salvage DAMAGED NEW`; see `disk/recover.py`."""

from __future__ import annotations

import sys

from state_pool.disk.recover import main

if __name__ == "__main__":
    sys.exit(main())
