"""The HTTP dialects: body -> Job, events -> body. No torch, no model, no state of a generation."""
