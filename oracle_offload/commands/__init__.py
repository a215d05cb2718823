"""Commands that read what a training has left, or writes: one file each; none imports torch."""
