"""One fetch of each block for several micro-batches."""
