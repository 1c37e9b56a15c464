"""What the libraries' pages promise to users of other trainers, with the trainer itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.sources import ROOT
from support.toys import toy_checkpoint

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.slow
def test_trl_trains_with_the_sandboxs_reward(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names: dict[str, Any] = {}
    example = re.findall(r"^```python\n(.*?)^```$", (ROOT / "libs/sandbox/README.md").read_text(), re.M | re.S)[0]
    exec(example, names)
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    # A program that fails, as those of an untrained model do, prints nothing: here that is half of the right answers.
    rows = [{"prompt": [{"role": "user", "content": "1 + 1"}], "stdin": "", "stdout": right} for right in ("", "2")]
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tokenizer,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=names["passes"],
    )
    with names["sandbox"]:
        trainer.train()
    assert trainer.state.log_history[0]["rewards/passes/mean"] == 0.5
