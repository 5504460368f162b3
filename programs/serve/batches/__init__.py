"""The batches of /openai/v1/batches, run in a process of their own: a client of the engine, as HTTP workers are."""
