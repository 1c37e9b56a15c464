"""Base class of inference engines, and rollmill's own."""

from __future__ import annotations

from typing import Literal

from rollmill.config.section import NamedSection


class EngineSection(NamedSection):
    """An engine chosen by name; its other keys are its options."""


class NativeEngineConfig(EngineSection):
    """rollmill's own engine, in the trainer's process and with the trainer's parameters."""

    implementation = "rollmill.orchestrator.engine:build_native"
    name: Literal["native"] = "native"
    after_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of unfinished completions after a weight update. `recompute`: rebuild it, so that every later token
    follows the new weights exactly. `keep`: keep the entries of the old weights, which saves that time; later tokens
    come from the new weights but attend to old keys and values. Either way a token's log-prob is that of the
    distribution it was sampled from."""
