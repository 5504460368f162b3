"""Weights of 8 and 4 bits: the formats' definition, the plain Linear of them, and their files beside the model."""
