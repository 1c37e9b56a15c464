"""The fault board: runs that are hurt in every known way, and recover or say what failed (docs/reliability.md)."""
