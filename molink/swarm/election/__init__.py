"""Leader election among peers, and the replicated coordinator state."""
