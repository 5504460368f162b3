"""Runs the model on its devices: stages, CUDA graphs, and copies of states."""
