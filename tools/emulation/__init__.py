"""Real worker processes, sockets and links, with compute that only takes its time.

A worker's shell (``molinkd.worker``) runs unchanged; its steps sleep as long as a profile says that
a device would compute, and give out recorded activations of the right size.
"""
