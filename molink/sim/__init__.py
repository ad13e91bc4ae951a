"""A discrete-event simulation that drives the product's own deciders in virtual time."""
