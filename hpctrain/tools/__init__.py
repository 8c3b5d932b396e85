"""Commands beside training: they look at the machine and at finished runs, and train nothing."""
