"""The host as the system shows it: its files, its memory, and the limits on it."""
