"""What travels between processes: messages, their codec, keys and authenticated sockets."""
