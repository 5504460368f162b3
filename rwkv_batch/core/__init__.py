"""Scheduling and the logic of rows: which rows run, which tokens are read, how outputs are processed. No torch."""
