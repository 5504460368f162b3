"""RWKV's formulas: weights from a file, layers, the forward, and state slots."""
