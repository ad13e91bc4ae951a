"""Whose turn it is: who is admitted next, who runs first, and who is preempted."""
