"""Operators between explorer and buffer: raw experiences in, verified ones out."""

from rollmill.pipelines.batch import Batch, OperatorReport, PipelineContext
from rollmill.pipelines.pipeline import Operator, Pipeline

__all__ = ["Batch", "Operator", "OperatorReport", "Pipeline", "PipelineContext"]
