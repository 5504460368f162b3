"""`python -m state_pool.salvage DAMAGED NEW`: the command, by the name that messages and documents give it."""

from __future__ import annotations

import sys

from state_pool.disk.recover import main

if __name__ == "__main__":
    sys.exit(main())
