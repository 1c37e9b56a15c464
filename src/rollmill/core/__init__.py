"""The nouns of rollmill: small, without I/O, importable everywhere."""

from rollmill.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    EngineError,
    ModelError,
    RewardError,
    RollmillError,
    TasksetError,
    TrainingError,
)
from rollmill.core.types import (
    Completion,
    Experience,
    Message,
    Source,
    StopReason,
    Task,
    Turn,
    experience_from_completion,
)

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "Experience",
    "Message",
    "ModelError",
    "RewardError",
    "RollmillError",
    "Source",
    "StopReason",
    "Task",
    "TasksetError",
    "TrainingError",
    "Turn",
    "experience_from_completion",
]
