"""The kinds of layers whose weights are streamed, and the ways to compute with them.

- A weight that code reads while the model computes, and all of a quantised layer, borrow for one
  operator at a time (`handle`). A call of a plain layer is one loan around its operator, with the
  derivative written out (`loan`): the fast path.
- A module that computes with Parameters of its own has them lent for its whole forward (`any`): for
  code that takes addresses, as cuDNN's recurrent kernels do, and so far for all other modules.
- Under torch.compile a layer, a lent module and a read are one operator each (`traced`,
  `compiled`).

What reads by handles leave as it was: the parts of ``nn.MultiheadAttention`` are lent to it, as its
fused kernel takes its weights in one operator with those that are lent; and a layer that diffusers
casts around each call is lent for as long, because that replaces the Parameter.
"""
