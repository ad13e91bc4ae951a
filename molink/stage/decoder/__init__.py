"""The decoder: blocks of attention and MLP, norms, experts, rotary positions."""
