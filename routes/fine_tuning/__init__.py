"""Fine-tuning: the data files, and the routes of its jobs in OpenAI's format."""
