"""From a body to the engine's rows: fields, prompts, token ids, limits."""
