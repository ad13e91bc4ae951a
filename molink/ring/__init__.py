"""One stage's place in the ring, sans-IO: what may run now, what goes on, what came round."""
