"""Routes in OpenAI's formats."""
