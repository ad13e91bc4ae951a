"""Servers as real processes, and a timing client, for benchmarks."""
