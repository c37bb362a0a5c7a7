"""Compute each kind of op in torch: the specification of the op table.

Each file of `program/ops` has a file of the same name here, which declares `REFERENCE_OPS`; `interpreter.py` finds it.
Every function takes (attrs, inputs, weights, memory) and returns the outputs; all are differentiable. Activations keep
the dtype of the weights; norms, rope and softmax compute in fp32.
"""
