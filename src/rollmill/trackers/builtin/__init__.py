"""The built-in trackers. Every module of this package is searched for them."""
