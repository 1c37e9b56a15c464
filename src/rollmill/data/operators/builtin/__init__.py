"""The built-in operators of `taskset.pipeline`. Every module of this package is searched for them."""
