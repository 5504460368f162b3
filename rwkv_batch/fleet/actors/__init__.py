"""Engines on the nodes of a Ray cluster, one actor per engine. HTTP workers reach them as Ray drivers."""
