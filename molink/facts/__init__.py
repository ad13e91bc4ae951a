"""Facts shared by all packages: profiles, devices, models, times of a ring."""
