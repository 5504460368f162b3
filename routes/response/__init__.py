"""From the engine's events to bytes: text, JSON, server-sent events."""
