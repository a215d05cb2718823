"""What keeps a training alive, and says when it does nothing; could be deleted whole.

Works for every torch model, attached or not, on every device.
"""
