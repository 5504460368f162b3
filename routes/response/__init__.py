"""Turns the engine's events into text, JSON and server-sent events."""
