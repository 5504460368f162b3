"""The real service under mixed traffic, kills and abuse: `python -m bench.chaos`."""
