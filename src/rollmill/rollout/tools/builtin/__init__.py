"""The built-in tools. Every module of this package is searched for them."""
