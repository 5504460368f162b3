"""Benchmarks; each prints one JSON line per measurement and a last line with all of them."""
