"""A swarm of real processes that is harmed while streams run, and what became of them."""
