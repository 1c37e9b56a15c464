"""`rollmill serve --tinker` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import tinker
from support.sources import PYTHONPATH
from support.tinker_servers import datum
from support.toys import toy_checkpoint
from tinker import types


def test_a_model_is_served_under_its_names(tmp_path: Path) -> None:
    folder = toy_checkpoint(tmp_path / "toy", "qwen3")
    words = [sys.executable, "-m", "rollmill", "serve", "--tinker", str(folder), "--base", f"hub/name={folder}"]
    words += ["--port", "0", "--checkpoints", str(tmp_path / "kept"), "--precision", "fp32"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        printed = ""
        while "TINKER_BASE_URL" not in printed and (line := process.stdout.readline()):
            printed += line
        key, url = re.search(r"shown once: (tml-\S+)", printed), re.search(r"TINKER_BASE_URL=(\S+)", printed)
        assert key is not None
        assert url is not None
        with tinker.ServiceClient(base_url=url[1], api_key=key[1]) as service:
            models = tinker.RestClient(base_url=url[1], api_key=key[1]).get_server_capabilities().result()
            assert [each.model_name for each in models.supported_models] == ["toy", "hub/name"]
            client = service.create_lora_training_client("hub/name", rank=4).result()
            client.forward_backward([datum([5, 9, 20, 7])], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            path = client.save_state("one").result().path
        assert (tmp_path / "kept" / path.removeprefix("tinker://") / "adapter_config.json").is_file()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.strip().endswith("ended")
