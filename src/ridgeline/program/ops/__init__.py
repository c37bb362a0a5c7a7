"""The kinds of ops, one file for each area; every file declares `ROWS`, its part of the op table.

A file holds the attributes of its ops, their shape rules and their cost rules. `opset.py` finds it by itself; the
reference functions in torch stand in the file of the same name in `backends/reference/ops/`.
"""
