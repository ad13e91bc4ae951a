"""What the serving benchmarks share: servers as real processes, and a client that takes times."""
