"""Backends that answer requests: an engine in this process, or a running service."""
