"""Adapters: small files that change a model's weights. Read in every form, merged as the model is loaded."""
