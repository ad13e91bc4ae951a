"""The stage agent's processes: workers, device daemons, probes and their preparation."""
