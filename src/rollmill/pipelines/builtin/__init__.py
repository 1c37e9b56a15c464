"""The built-in operators of `pipeline`. Every module of this package is searched for them."""
