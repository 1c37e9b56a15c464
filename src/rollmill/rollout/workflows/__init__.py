"""The built-in workflows, one file per kind."""
