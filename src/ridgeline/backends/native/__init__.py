"""Implement the native CPU backend: the program as a tape of C++ instructions. Needs the compiled module
`ridgeline._native`.
"""
