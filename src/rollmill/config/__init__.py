"""Strict run configuration: one model per section, loading, overrides and the capability check. Imports no torch."""
