"""How the next token is chosen: one definition (params.py), several implementations by name."""
