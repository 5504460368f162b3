"""`python app.py chat`: a conversation on a terminal, with an engine of its own or with a service at a URL."""
