"""Scheduling policies: the order of admission, execution and preemption."""
