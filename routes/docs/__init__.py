"""The interface described: OpenAPI document, reference page."""
