"""Transmission from one stage to the next: policies, numbering, acknowledgement, heartbeats."""
