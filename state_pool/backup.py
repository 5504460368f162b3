"""The command `python -m state_pool.backup DATABASE COPY`; see `disk/copies.py`."""

from __future__ import annotations

import sys

from state_pool.disk.copies import main

if __name__ == "__main__":
    sys.exit(main())
