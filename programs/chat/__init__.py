"""The `chat` command: a conversation on a terminal, with a local engine or a service at a URL."""
