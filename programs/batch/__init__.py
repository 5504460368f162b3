"""The `batch` command: files in, files out. Each line becomes a request to one of the service's routes."""
