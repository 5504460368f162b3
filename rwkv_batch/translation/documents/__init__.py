"""Documents: files with texts to translate, a module per family of formats. No HTTP, no engine."""
