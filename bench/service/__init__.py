"""What clients of the service notice over HTTP: streams, their gaps, models that come and go."""
