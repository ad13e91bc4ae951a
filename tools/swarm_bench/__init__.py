"""Many daemons on one PC: how soon they form a swarm, and what its control plane costs."""
