"""Small wrong changes of the product, and which tests see them: `python -m bench.mutants`."""
