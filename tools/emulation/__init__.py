"""Real worker processes, sockets and links with emulated compute.

A worker (``molinkd.worker``) runs unchanged; its steps sleep for the profiled time and return
recorded activations of the right size.
"""
