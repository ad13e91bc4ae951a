"""Reads a model folder without torch: config, tensors, sizes."""
