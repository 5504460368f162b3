"""Quantised weights of 8 and 4 bits: the formats, and their files next to the model."""
