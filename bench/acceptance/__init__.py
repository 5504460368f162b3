"""The acceptance tests of several engines on one machine; `python -m bench.acceptance MODE`."""
