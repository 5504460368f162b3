"""RWKV-4, 5 and 6 in plain torch: one file per version's time mix, and common code."""
