"""The real service under mixed traffic, kills and malformed requests: `python -m bench.chaos`."""
