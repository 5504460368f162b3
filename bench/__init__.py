"""Programs that measure: `python -m bench.NAME`. The last line of each is JSON.

`bench.chaos` is a folder with its parts. `bench/tools` is what several programs share.
"""
