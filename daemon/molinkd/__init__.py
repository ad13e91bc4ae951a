"""What runs: processes, event loops, supervision, HTTP and the command line, over ``molink``."""
