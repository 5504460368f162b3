"""Samplers: one definition (naive.py) and several implementations, chosen by name (registry.py)."""
