"""Whose turn it is: which request is admitted, in what order, and who is preempted."""
