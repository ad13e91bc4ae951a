"""The MoLink paper's evaluation (Tables 2 to 5), simulated and on real processes and links."""
