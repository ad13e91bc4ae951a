"""What a model folder says of itself, read without torch: config, tensors, sizes."""
