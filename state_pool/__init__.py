"""Sessions and cached prefixes: states in VRAM slots (L1), host memory (L2) and SQLite (L3)."""
