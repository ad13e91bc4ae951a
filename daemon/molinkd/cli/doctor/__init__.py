"""``molink doctor``: what is wrong on this PC, and the command that mends it."""
