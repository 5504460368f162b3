"""Engines on the nodes of a Ray cluster: an actor each, which HTTP workers of any node reach as Ray drivers."""
