"""Weight transfer: how the trainer's weights reach the engines, with a version, whole or not at all."""

from rollmill.weights.base import WeightPublisher, WeightReceiver, WeightSender
from rollmill.weights.broadcast import BroadcastSender
from rollmill.weights.broadcast_receiver import BroadcastReceiver
from rollmill.weights.folder import FolderReceiver, FolderSender
from rollmill.weights.in_place import InPlacePublisher
from rollmill.weights.publisher import TransferPublisher
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
