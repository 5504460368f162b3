"""What several programs share: load, clocks, random models, what a figure is from. Imports no program."""
