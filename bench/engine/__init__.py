"""The engine alone, on one device or none: its steps, its thread, what rows cost each other."""
