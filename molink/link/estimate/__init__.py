"""What a link is like, as measured: latency, rate, and what was remembered of it."""
