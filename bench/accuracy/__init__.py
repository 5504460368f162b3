"""How far results are from exact ones: parts of `bench.quality`."""
