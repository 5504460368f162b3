"""Tensors in files: their places, the header of GGUF, and its quantised blocks."""
