"""The batched RWKV-7 engine: requests in, token events out. Knows no HTTP."""
