"""Routes that translate, each in another API's format."""
