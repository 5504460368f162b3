"""The demo model: its training text, its training, its figures and its file."""
