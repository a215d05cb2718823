"""The engines of the devices: shared by their models, real or simulated."""
