"""Between processes: the engine's socket, its messages, both ends of it."""
