"""The HTTP worker process with Robyn."""
