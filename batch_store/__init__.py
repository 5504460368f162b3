"""Files and batches of /openai/v1: contents in files, records in SQLite. HTTP workers and `bulk.batches` share them."""
