"""Extraction of final answers: candidates with their evidence, hedges, the choice of one, and its normalised form."""
