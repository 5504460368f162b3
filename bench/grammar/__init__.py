"""Answers held to a grammar or a schema: `python -m bench.grammar`, and suites of schemas."""
