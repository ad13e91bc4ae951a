"""Fetching and replicating model files."""
