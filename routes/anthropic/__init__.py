"""Anthropic's Messages API: its bodies become those of the OpenAI routes, and the engine's output its blocks."""
