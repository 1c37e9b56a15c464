"""The built-in workflows. Every module of this package is searched for them."""
