"""Programs that measure; each prints one JSON line per measurement and a last line with all of them.

Beside the rooms stand those that are run by hand most: `python -m bench.gpu`, `bench.serve`, `bench.quality`. A room
has the rest, by what is measured: `python -m bench.ROOM.NAME`, or `python -m bench.ROOM` where that is a program
itself.
"""
