"""Files in, files out: `python -m bench.batch`; its restarts, and what interactive requests notice of it."""
