"""Inter-process communication: the engine's socket, its messages, and both ends."""
