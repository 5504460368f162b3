"""Computes: the model on its devices, graphs of steps, states copied to and from slots."""
