"""The built-in environments. Every module of this package is searched for them."""
