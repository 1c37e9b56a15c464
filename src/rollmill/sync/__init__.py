"""Weight transfer: how the trainer's weights reach the engines, with a version, whole or not at all."""

from rollmill.sync.base import WeightPublisher, WeightReceiver, WeightSender
from rollmill.sync.broadcast_receiver import BroadcastReceiver
from rollmill.sync.broadcast_sender import BroadcastSender
from rollmill.sync.folder import FolderReceiver, FolderSender
from rollmill.sync.in_place import InPlace
from rollmill.sync.publisher import Publisher
from rollmill.sync.shared import SharedReceiver, SharedSender, shared_folder

__all__ = [
    "BroadcastReceiver",
    "BroadcastSender",
    "FolderReceiver",
    "FolderSender",
    "InPlace",
    "Publisher",
    "SharedReceiver",
    "SharedSender",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSender",
    "shared_folder",
]
