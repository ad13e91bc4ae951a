"""Communication between processes: messages, codec, keys, authenticated sockets."""
