"""`python -m routes.reference`: writes docs/api.md; the command, by the name that documents give it."""

from __future__ import annotations

from routes.docs.reference import main

if __name__ == "__main__":
    main()
