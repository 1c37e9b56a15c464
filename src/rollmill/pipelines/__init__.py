"""Experience pipeline: operators that filter, change and add experiences between explorer and buffer."""

from rollmill.pipelines.batch import Batch, OperatorReport, PipelineContext
from rollmill.pipelines.pipeline import Operator, Pipeline

__all__ = ["Batch", "Operator", "OperatorReport", "Pipeline", "PipelineContext"]
