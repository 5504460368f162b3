"""Several engines behind one interface: routing, and moving jobs when an engine is lost. No torch, no HTTP."""
