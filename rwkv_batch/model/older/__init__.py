"""RWKV-4, 5 and 6: a file for each version's time mix, in plain torch; what they share stands beside them."""
