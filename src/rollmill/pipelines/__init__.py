"""Operators between explorer and buffer: raw experiences in, verified ones out."""

from rollmill.pipelines.batch import Batch, Context, Report
from rollmill.pipelines.pipeline import Operator, Pipeline

__all__ = ["Batch", "Context", "Operator", "Pipeline", "Report"]
