"""Structure-aware fuzzing of the readers of files that users give."""
