"""Weight transfer: versioned, atomic updates of the engines' weights from the trainer."""

from rollmill.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollmill.weights.folder import FolderReceiver, FolderSender
from rollmill.weights.publisher import (
    InPlacePublisher,
    TransferPublisher,
    WeightPublisher,
    WeightReceiver,
    WeightSender,
)
from rollmill.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, shared_memory_folder

__all__ = [
    "BroadcastReceiver",
    "BroadcastSender",
    "FolderReceiver",
    "FolderSender",
    "InPlacePublisher",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "TransferPublisher",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSender",
    "shared_memory_folder",
]
