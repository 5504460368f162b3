"""Starts, monitors and restarts the processes of the service. Imports neither torch nor Robyn."""
