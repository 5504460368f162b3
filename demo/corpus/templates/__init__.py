"""Templates of sentences: each draws one meaning and says it in both languages."""
