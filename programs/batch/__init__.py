"""Files in, files out: `python app.py batch`. Every line is a body of one of the service's own routes."""
