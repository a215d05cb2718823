"""The kinds of layers whose weights are streamed, and the loan that they share."""
