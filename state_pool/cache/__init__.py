"""L1 and L2: slots, host memory, cached prompt prefixes, loaded states."""
