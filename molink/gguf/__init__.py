"""Reads GGUF files of llama.cpp as untrusted input."""
