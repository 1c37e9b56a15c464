"""The built-in workflows, one file each."""
