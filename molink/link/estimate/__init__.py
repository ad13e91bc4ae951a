"""Link estimates: latency, rate, and their memory across restarts."""
