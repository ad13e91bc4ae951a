"""Congestion control of simulated TCP: a protocol, its implementations, and their choice."""
