"""Several engines behind one face: who gets a job, and how it goes on when its engine is lost. No torch, no HTTP."""
