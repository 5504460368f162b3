"""Benchmark programs: `python -m bench.NAME`. The last line of each is JSON.

`bench.chaos` is a folder of one program. `bench/tools` has the shared parts.
"""
