"""Tools that a policy calls, and how calls are written in text."""
