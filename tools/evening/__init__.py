"""An evening on which links and PCs change: what happens when, and what became of it."""
