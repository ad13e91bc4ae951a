"""Congestion control of simulated TCP connections."""
