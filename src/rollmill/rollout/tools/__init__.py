"""Tools that a policy calls, and the text formats of calls."""
