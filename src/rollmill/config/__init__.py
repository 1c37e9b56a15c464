"""Strict configuration: models per section, loading, overrides and the capability check. Imports no torch."""
