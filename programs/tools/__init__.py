"""Commands for files and machines: `inspect`, `convert` and `doctor`."""
