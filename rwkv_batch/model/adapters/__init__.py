"""Adapter files: readers, formulas, merging into weights, and pairs for single rows."""
