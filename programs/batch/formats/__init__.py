"""What a file of lines looks like: a reader and a writer for each form."""
