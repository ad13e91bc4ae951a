"""The model on torch: weights, layers, attention over paged KV, sampling."""
