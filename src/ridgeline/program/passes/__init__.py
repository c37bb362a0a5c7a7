"""Views and rewrites of a Program, each a function in a file of its own. No torch."""
