"""The version, in one place: pyproject.toml and CITATION.cff's test read it here."""

__version__ = "0.1.0"

COMMIT = ""
"""The commit of an installed package; setup.py writes it into the wheel. Empty in a clone: git knows it there."""
