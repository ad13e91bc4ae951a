"""Ollama's API, for the clients that speak only that."""
