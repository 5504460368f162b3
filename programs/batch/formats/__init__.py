"""File formats: a reader and a writer per format."""
