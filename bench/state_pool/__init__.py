"""Sessions and where they are stored: `python -m bench.state_pool`, crowds, lists, stores of several engines."""
