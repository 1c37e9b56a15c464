"""One short file per algorithm: formula, source and defaults, as data. `rollmill algorithms NAME` prints one."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field, SerializeAsAny, WrapValidator

from rollmill.config.algorithm import AlgorithmOptions
from rollmill.config.section import RegisteredUnion, registered_sections
from rollmill.recipes.asymre import AsymRE
from rollmill.recipes.chord import CHORD
from rollmill.recipes.cispo import CISPO
from rollmill.recipes.clip_b import ClipB
from rollmill.recipes.clip_v import ClipV
from rollmill.recipes.dapo import DAPO
from rollmill.recipes.distillation import Distill, DistillationOptions
from rollmill.recipes.dppo import DPPO
from rollmill.recipes.dr_grpo import DrGRPO
from rollmill.recipes.entropy import ClipCov
from rollmill.recipes.gdpo import GDPO
from rollmill.recipes.gigpo import GiGPO
from rollmill.recipes.gmpo import GMPO
from rollmill.recipes.gpg import GPG
from rollmill.recipes.grpo import GRPO
from rollmill.recipes.high_entropy import HighEntropy
from rollmill.recipes.jsd import JSD
from rollmill.recipes.kimi import Kimi
from rollmill.recipes.kl_cov import KLCov
from rollmill.recipes.kto import KTO
from rollmill.recipes.lite_ppo import LitePPO
from rollmill.recipes.m2po import M2PO
from rollmill.recipes.mix import MIX
from rollmill.recipes.off_policy import TOPR
from rollmill.recipes.opmd import OPMD
from rollmill.recipes.opo import OPO
from rollmill.recipes.orpo import ORPO
from rollmill.recipes.otb import OTB
from rollmill.recipes.pass_at_k import PassAtKTraining
from rollmill.recipes.ppo import PPO
from rollmill.recipes.preference import DPO
from rollmill.recipes.raft import RAFT
from rollmill.recipes.rec import REC
from rollmill.recipes.reinforce import Reinforce
from rollmill.recipes.reinforce_plus_plus import ReinforcePlusPlus
from rollmill.recipes.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from rollmill.recipes.remax import ReMax
from rollmill.recipes.reward_model import RewardModel
from rollmill.recipes.rloo import RLOO
from rollmill.recipes.sapo import SAPO
from rollmill.recipes.self_distill import SelfDistill
from rollmill.recipes.sequence_ratio import GSPO
from rollmill.recipes.sft import SFT
from rollmill.recipes.sft_is import SFTImportance
from rollmill.recipes.sft_phi import SFTPhi
from rollmill.recipes.skywork_or1 import SkyworkOR1
from rollmill.recipes.sppo import SPPO
from rollmill.recipes.stepwise_grpo import StepwiseGRPO
from rollmill.recipes.vespo import VESPO

AlgorithmUnion = Annotated[
    GRPO
    | DrGRPO
    | DAPO
    | RLOO
    | Reinforce
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | ReMax
    | PPO
    | GSPO
    | CISPO
    | SAPO
    | TOPR
    | OPMD
    | Kimi
    | AsymRE
    | REC
    | SPPO
    | RAFT
    | GPG
    | GMPO
    | OPO
    | OTB
    | VESPO
    | ClipCov
    | KLCov
    | ClipB
    | ClipV
    | HighEntropy
    | SkyworkOR1
    | PassAtKTraining
    | LitePPO
    | M2PO
    | DPPO
    | GDPO
    | StepwiseGRPO
    | GiGPO
    | SFT
    | SFTImportance
    | SFTPhi
    | MIX
    | CHORD
    | DPO
    | ORPO
    | KTO
    | Distill
    | JSD
    | SelfDistill
    | RewardModel,
    Field(discriminator="name"),
]

AlgorithmConfig = Annotated[SerializeAsAny[AlgorithmUnion], WrapValidator(RegisteredUnion("algorithm"))]


def known_algorithms() -> dict[str, type[AlgorithmOptions]]:
    """Returns all algorithms by name: the built-in ones in the order of `AlgorithmUnion`, then those registered by
    users.
    """
    built_in = list(get_args(get_args(AlgorithmUnion)[0]))
    return {str(each.model_fields["name"].default): each for each in (*built_in, *registered_sections("algorithm"))}


__all__ = [
    "CHORD",
    "CISPO",
    "DAPO",
    "DPO",
    "DPPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "JSD",
    "KTO",
    "M2PO",
    "MIX",
    "OPMD",
    "OPO",
    "ORPO",
    "OTB",
    "PPO",
    "RAFT",
    "REC",
    "RLOO",
    "SAPO",
    "SFT",
    "SPPO",
    "TOPR",
    "VESPO",
    "AlgorithmConfig",
    "AlgorithmOptions",
    "AsymRE",
    "ClipB",
    "ClipCov",
    "ClipV",
    "Distill",
    "DistillationOptions",
    "DrGRPO",
    "GiGPO",
    "HighEntropy",
    "KLCov",
    "Kimi",
    "LitePPO",
    "PassAtKTraining",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RewardModel",
    "SFTImportance",
    "SFTPhi",
    "SelfDistill",
    "SkyworkOR1",
    "StepwiseGRPO",
    "known_algorithms",
]
