"""Weights of 8 and 4 bits: the formats' definition, and their files beside the model."""
