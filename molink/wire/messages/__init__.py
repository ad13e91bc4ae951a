"""What travels: tagged, bounded messages and their codec. No sockets."""
