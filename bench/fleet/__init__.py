"""Several engines behind one service, measured and simulated."""
