"""Robyn and its process: the wrapper around every handler, the threads."""
