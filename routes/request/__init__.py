"""Turns request bodies into the engine's rows."""
