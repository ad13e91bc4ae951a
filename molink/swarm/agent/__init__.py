"""What a peer decides about its own stages."""
