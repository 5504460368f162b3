"""Who answers: an engine in this process, or a running service."""
