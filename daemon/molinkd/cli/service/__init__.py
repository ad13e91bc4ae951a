"""``molink service``: this PC's part in its swarm, kept running by the operating system."""
