"""Grammars that hold a row's text: constraints, compiled grammars, matchers, and masks of the tokens allowed next."""
