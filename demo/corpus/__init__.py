"""The generator of training text: deterministic by seed, every line of it composed here."""
