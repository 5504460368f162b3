"""Grammars: constraints on a row's text, compilation, matchers and token masks."""
