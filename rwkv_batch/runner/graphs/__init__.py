"""CUDA graphs of steps: of decode, of prefill, of both, and in pieces of a few layers."""
