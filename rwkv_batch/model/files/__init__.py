"""Tensors in files: their places, the header of GGUF, and its quantised blocks."""

WRITTEN_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}
"""Names of types on the command line -> in Place"""
WRITTEN_SUFFIXES = (".pth", ".safetensors", ".gguf")
