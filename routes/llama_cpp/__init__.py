"""llama.cpp's routes, and the routes about tokens, which vLLM has too."""
