"""Sessions and cached prefixes: states in GPU slots (L1), host memory (L2) and a database (L3)."""
