"""The HTTP API: turns bodies into jobs, and events into bodies. No torch, no model, no generation state."""
