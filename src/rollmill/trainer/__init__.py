"""The trainer: packing, log-probs, loss, optimizer and schedules, on one device or several ranks."""

from rollmill.trainer.distributed.trainer import DistributedTrainer
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer

__all__ = ["DistributedTrainer", "RewardTrainer", "Trainer"]
