"""What went wrong, and is this machine fit to train; could be deleted whole."""
