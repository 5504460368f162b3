"""Translation of texts: languages, segments, markers, checks and the plan of a request. No HTTP, no torch."""
