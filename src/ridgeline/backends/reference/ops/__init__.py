"""Compute each kind of op in torch: the specification of the op table.

Each file of `program/ops` has a file of the same name here, with a function for each row, named as its kind;
`interpreter.py` finds them. They take (attrs, inputs, weights, memory) and return the outputs; all are differentiable.
Activations keep the dtype of the weights; norms, rope and softmax compute in fp32.
"""
