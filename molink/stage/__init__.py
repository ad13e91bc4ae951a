"""Runs a model's layers on torch: weights, attention over paged KV, sampling."""
