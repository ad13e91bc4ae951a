"""Embeddings and rankings: prompts that are answered by one row or score each."""
