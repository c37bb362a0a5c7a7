"""Models in GGUF files: read without copying more than a tensor at a time, nothing in them trusted."""
