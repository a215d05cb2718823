"""An attached model: what is managed, where its weights are, and how it is closed."""
