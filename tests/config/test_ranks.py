"""What several ranks cannot do is an error of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_run

from rollmill.config.loader import load_run
from rollmill.errors import ConfigError

FSDP = {"ranks": 2, "sharding": "fsdp"}
PAIRS = {"fields": {"rejected": "answer"}}
LORA = {"path": ".", "new": None, "lora": {"rank": 2}}


def load(folder: Path, **changes: Any) -> Any:
    return load_run(tiny_run(folder, stages=None, steps=4, **changes), require_files=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"sharding": "fsdp"}}, r"trainer.sharding: not honoured with one rank; give trainer.ranks"),
        ({"trainer": {"rank_deadline_s": 9}}, r"trainer.rank_deadline_s: not honoured with one rank"),
        ({"trainer": {"ranks": 0}}, r"trainer.ranks: "),
        (
            {"trainer": FSDP, "offload": "auto"},
            r"offload: not honoured with trainer.sharding `(fsdp|tensor|expert)`: shards",
        ),
        ({"trainer": FSDP, "model": LORA}, r"trainer.sharding: adapters \(model.lora\) cannot be sharded yet"),
        (
            {"trainer": FSDP, "algorithm": {"name": "reward_model"}, "taskset": PAIRS, "evaluation": None},
            r"trainer.sharding: algorithm `reward_model` cannot be sharded yet; use `none`",
        ),
        (
            {"trainer": FSDP, "algorithm": {"name": "ppo", "critic": {"network": "policy"}}},
            r"algorithm.critic.network: a head on the policy's network cannot be trained beside shards yet",
        ),
    ],
)
@pytest.mark.parametrize("sharding", ["fsdp", "tensor", "expert"])
def test_what_does_not_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str, sharding: str) -> None:
    if changes["trainer"].get("sharding"):
        changes = changes | {"trainer": changes["trainer"] | {"sharding": sharding}}
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **changes)


def test_ranks_that_share_rows_have_all_weights(tmp_path: Path) -> None:
    """So adapters, `offload` and a critic's head work with them; pairs of a reward model do not yet."""
    shared = {"ranks": 2, "sharding": "context"}
    load(tmp_path, trainer=shared, model=LORA, offload="auto")
    load(tmp_path, trainer=shared, algorithm={"name": "ppo", "critic": {"network": "policy"}})
    with pytest.raises(
        ConfigError, match=r"trainer.sharding: algorithm `reward_model` cannot share the tokens of a row"
    ):
        load(tmp_path, trainer=shared, algorithm={"name": "reward_model"}, taskset=PAIRS, evaluation=None)


def test_what_works_loads_again_from_its_resolved_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, trainer=FSDP, algorithm={"name": "ppo"})
    (tmp_path / "config.yaml").write_text(loaded.to_yaml())
    assert load_run(tmp_path / "config.yaml").stages[0].trainer == loaded.stages[0].trainer
    assert "sharding" not in load(tmp_path, trainer={"ranks": 1}).to_yaml()
