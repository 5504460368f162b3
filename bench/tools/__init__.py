"""Shared parts of the programs: HTTP load, timers, random models, machine records. Imports no program."""
