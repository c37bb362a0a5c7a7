"""The plain-torch meaning of each op kind: the specification of the op table, one file for each file of `program/ops`.

Every function takes (attrs, inputs, weights, memory) and returns the outputs; all are differentiable. Activations keep
the dtype of the weights; norms, rope and softmax compute in fp32. A file declares `MEANINGS`; `ops.py` finds it.
"""
