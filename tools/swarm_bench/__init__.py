"""Many daemons on one PC: time to form a swarm, and cost of the control plane."""
