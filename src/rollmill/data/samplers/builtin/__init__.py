"""The built-in orders of tasks. Every module of this package is searched for them."""
