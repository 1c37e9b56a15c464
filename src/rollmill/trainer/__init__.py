"""The trainer: packing, log-probs, loss, optimizer and schedules on one device."""

from rollmill.trainer.calibrate import choose_precision, choose_threads
from rollmill.trainer.scoring import ScoreTrainer
from rollmill.trainer.trainer import Trainer

__all__ = ["ScoreTrainer", "Trainer", "choose_precision", "choose_threads"]
