"""Is this machine fit to train? Readers of the machine's limits, and the checks upon them."""
