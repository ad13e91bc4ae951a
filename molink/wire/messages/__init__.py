"""Tagged, bounded messages and their codec. No sockets."""
