"""The trainer: packing, log-probs, loss, optimizer and schedules, on one device or several ranks."""

from rollmill.trainer.calibrate import choose_precision, choose_threads
from rollmill.trainer.ranked import RankedTrainer
from rollmill.trainer.scoring import ScoreTrainer
from rollmill.trainer.trainer import Trainer

__all__ = ["RankedTrainer", "ScoreTrainer", "Trainer", "choose_precision", "choose_threads"]
