"""Decoder layers: attention, MLP, norms, experts, RoPE."""
