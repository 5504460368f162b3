"""Shapes and formulas: weights from a file, layers, the forward, the slots of state it works on."""
