"""Judges that rollmill's own engine decodes, and one behind a real vLLM server."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_helpers import completion, judged, picture, task
from support.toys import toy_checkpoint, toy_model, toy_tokenizer
from tokenizers import AddedToken

from rollmill.errors import ModelError, RewardError
from rollmill.models.from_scratch import save_policy
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.rewards.builtin.pairwise import PairwiseReward
from rollmill.rewards.builtin.ranking import RankingReward
from rollmill.rewards.judges import native as native_module
from rollmill.rewards.judges.chat import ChatSamplingParams
from rollmill.rewards.judges.native import load_native_chat_model

CONTEXT = 4096
ROOT = Path(__file__).resolve().parents[2]


def parrot(path: Path, pieces: Sequence[str]) -> Path:
    """A real model that answers any chat with these pieces: each token is followed by one token, whatever came before.

    Attention and MLPs add nothing, so the logits are those of the last token's embedding.
    """
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    end: int = tokenizer.eos_token_id
    size = {"vocab_size": len(tokenizer), "hidden_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model = toy_model("llama", **size, eos_token_id=end, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    start: int = tokenizer.encode("assistant:\n")[-1]
    chain = [start, *(tokenizer.convert_tokens_to_ids(piece) for piece in pieces), end]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_().fill_diagonal_(1)
        model.lm_head.weight.zero_()
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 2.0
    save_policy(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parrot(tmp_path_factory.mktemp("judge") / "model", ['Fine. {"score": ', "7.5", "}"])


def test_a_model_in_a_folder_judges(folder: Path) -> None:
    config = JudgeReward(name="judge", path=folder)
    with build_reward_manager([config], device="cpu") as judge:
        found = judged(judge, "5", "It is 5.")
        counters = judge.counters()
    assert (found.reward, found.outcomes) == (0.75, {"judge": "ok"})
    assert counters["judge/completion_tokens"] == 4
    assert counters["judge/prompt_tokens"] > 100


def test_groups_and_votes(tmp_path: Path) -> None:
    model = parrot(tmp_path / "model", ['{"ranking": [2', ", ", "1]}"])
    configs = [
        RankingReward(name="ranking", path=model, shuffles=1, votes=3, temperature=0.5),
        PairwiseReward(name="pairwise", path=model, unparsable_reward=-1),
    ]
    group = [completion(text, index) for index, text in enumerate("ab")]
    with build_reward_manager(configs, device="cpu") as judge:
        found = asyncio.run(judge.score_group(task("5"), group))
        assert judge.counters()["ranking/calls"] == 3
        assert judge.counters()["pairwise/malformed"] == 4
    assert sorted(each.parts["ranking"] or 0 for each in found) == [0, 1]
    assert {each.outcomes["pairwise"] for each in found} == {"unparsable"}


def test_samples_depend_on_their_index_only(tmp_path: Path) -> None:
    """A model of random weights: greedy samples agree, others differ, and each is the same in any company."""
    model = load_native_chat_model(toy_checkpoint(tmp_path / "model", "qwen3"), "cpu")
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "how many apples?"}]

    def texts(temperature: float, indices: list[int], seed: int = 0) -> list[str]:
        work = model.chat(messages, ChatSamplingParams(temperature, 12, seed), indices)
        return [reply.text for reply in asyncio.run(model.loop.run(work))]

    assert len(set(texts(0.0, [0, 1, 2]))) == 1
    several = texts(1.0, [0, 1, 2])
    assert len(set(several)) == 3
    assert texts(1.0, [2, 0]) == [several[2], several[0]]
    assert texts(1.0, [0], seed=1) != several[:1]


def test_a_judge_and_a_policy_decode_at_the_same_time(tmp_path: Path) -> None:
    """Two engines in two threads: what each of them generates is what it generates alone."""
    models = [load_native_chat_model(toy_checkpoint(tmp_path / name, name), "cpu") for name in ("qwen3", "llama")]
    sampling = ChatSamplingParams(1.0, 24, 0)

    async def asked(model: Any, times: int) -> list[str]:
        found = []
        for number in range(times):
            question = [{"role": "user", "content": f"how many apples? {number}"}]
            found += [reply.text for reply in await model.loop.run(model.chat(question, sampling, [0, 1, 2]))]
        return found

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(*(asked(model, 2) for model in models)))

    alone = [asyncio.run(asked(model, 2)) for model in models]
    assert asyncio.run(both()) == alone


def test_random_weights_give_no_verdict(tmp_path: Path) -> None:
    path = toy_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=CONTEXT)
    with build_reward_manager(
        [JudgeReward(name="judge", path=path, max_tokens=8, unparsable_reward=-1)], device="cpu"
    ) as judge:
        assert judged(judge, "5", "5").outcomes == {"judge": "unparsable"}
        assert judge.counters()["judge/calls"] == 2


def test_the_models_own_control_tokens_end_no_turn(folder: Path) -> None:
    model = load_native_chat_model(folder, "cpu")
    end = model._tokenizer.convert_tokens_to_ids("<|end|>")
    eos = model._tokenizer.eos_token_id
    ids = model._encoded([{"role": "user", "content": "a<|end|>b<eos>c"}])
    assert end not in ids
    assert eos not in ids
    assert model._tokenizer.encode("<|end|><eos>") == [end, eos]


def test_a_template_that_refuses_a_system_turn(tmp_path: Path) -> None:
    path = parrot(tmp_path / "model", ['{"score": ', "10", "}"])
    template = path / "chat_template.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + template.read_text()
    )
    with build_reward_manager([JudgeReward(name="judge", path=path)], device="cpu") as judge:
        assert judged(judge, "5", "5").reward == 1.0


@pytest.mark.parametrize("pieces", [['{"score": 2}', "\n</think>\n\n", '{"score": 5}'], ['{"score": 2}']])
def test_a_verdict_comes_after_the_reasoning_that_the_prompt_opens(tmp_path: Path, pieces: list[str]) -> None:
    path = parrot(tmp_path / "model", pieces)
    template = path / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}")
    with build_reward_manager([JudgeReward(name="judge", path=path, unparsable_reward=-1)], device="cpu") as judge:
        assert judged(judge, "5", "5").reward == (0.5 if len(pieces) > 1 else -1)


def test_a_turn_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    """The checkpoint's own end of sequence is another token, as of many base models."""
    path = parrot(tmp_path / "model", ['{"score": 10}', "<|end|>", "\n\n{"])
    template = path / "chat_template.jinja"
    template.write_text(
        "{% for each in messages %}{{ each.role }}:\n{{ each.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    with build_reward_manager([JudgeReward(name="judge", path=path)], device="cpu") as judge:
        assert judged(judge, "5", "5").reward == 1.0
        assert judge.counters()["judge/completion_tokens"] == 2


def test_what_does_not_fit(folder: Path) -> None:
    config = JudgeReward(name="judge", path=folder, response_limit=10**6, unparsable_reward=-1)
    with build_reward_manager([config], device="cpu") as judge:
        assert judged(judge, "5", "apples " * 4000).outcomes == {"judge": "too_long"}
    with (
        build_reward_manager([config.model_copy(update={"rubric": "apples " * 4000})], device="cpu") as judge,
        pytest.raises(
            RewardError,
            match=r"whatever the response: \d+ tokens and 1024 of the reply; the judge's context is 4096; shorten",
        ),
    ):
        judged(judge, "5", "5")


def test_pictures_need_an_endpoint(folder: Path, tmp_path: Path) -> None:
    images = [picture(tmp_path / "a.png")]
    with (
        build_reward_manager([JudgeReward(name="judge", path=folder)], device="cpu") as judge,
        pytest.raises(RewardError, match="a judge with `path` reads text only; set images: false"),
    ):
        judged(judge, "5", "5", images=images)
    with build_reward_manager([JudgeReward(name="judge", path=folder, images=False)], device="cpu") as judge:
        assert judged(judge, "5", "5", images=images).reward == 0.75


def test_rewards_of_a_folder_share_one_model_and_its_thread_ends_with_it(folder: Path) -> None:
    gc.collect()
    config = JudgeReward(name="judge", path=folder)
    judges = [build_reward_manager([config, config], device="cpu") for _ in range(2)]
    assert len(native_module._models) == 1
    assert judged(judges[0], "5", "5").reward == 1.5
    for judge in judges:
        judge.close()
    [model] = native_module._models.values()
    thread = model.loop._thread
    assert thread is not None
    del judges, judge, model
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert not native_module._models


def test_a_cache_serves_a_folder_until_it_changes(folder: Path, tmp_path: Path) -> None:
    config = JudgeReward(name="judge", path=folder, cache=tmp_path / "cache.sqlite")
    for calls in (1, 0, 1):
        with build_reward_manager([config], device="cpu") as judge:
            assert judged(judge, "5", "5").reward == 0.75
            assert judge.counters()["judge/calls"] == calls
        del judge
        gc.collect()
        if not calls:
            os.utime(folder / "config.json", ns=(1, 1))


def test_folders_that_hold_no_judge(tmp_path: Path) -> None:
    path = toy_checkpoint(tmp_path / "model", "qwen3")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template; use a model that was tuned for chat"):
        build_reward_manager([JudgeReward(name="judge", path=path)], device="cpu")
    with pytest.raises(ModelError, match=r"a judge's path: .+ does not exist"):
        build_reward_manager([JudgeReward(name="judge", path=tmp_path / "none")], device="cpu")


@pytest.mark.slow
def test_an_endpoint_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from rollmill.rewards.builtin.judge import JudgeReward\n"
        "from rollmill.rewards import build_reward_manager\n"
        "build_reward_manager([JudgeReward(name='judge', endpoint='http://x/v1', model='m')]).close()\n"
        "assert 'torch' not in sys.modules\n"
        "import rollmill.config.rewards as _\n"
        "assert 'openai' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- vLLM --------------------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """The base URL of what `vllm serve` starts, in the environment of `make vllm-setup`; skips where there is none."""
    python = Path(os.environ.get("ROLLMILL_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"no vLLM at {python}: run `make vllm-setup`, or set ROLLMILL_VLLM_PYTHON")
    options = f"--served-model-name toy --host 127.0.0.1 --dtype float32 --max-model-len {CONTEXT}"
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager", *options.split()]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    for attempt in range(2):  # another process may take the port before the server does
        port = _free_port()
        command = [*map(str, argv), "--port", str(port)]
        with log.open("wb") as output:
            server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            if _answers(f"http://127.0.0.1:{port}/health", server, log, may_fail=attempt == 0):
                yield f"http://127.0.0.1:{port}/v1"
                return
        finally:
            server.terminate()
            server.wait(60)


def _answers(url: str, server: subprocess.Popen[Any], log: Path, *, may_fail: bool) -> bool:
    """Wait for the server. Where it may fail, False if its port was taken."""
    for _ in range(480):
        if server.poll() is not None:
            said = log.read_text()
            assert may_fail, said[-3000:]
            assert "ddress already in use" in said, said[-3000:]
            return False
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM does not start\n{log.read_text()[-3000:]}")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_serves_a_judge(folder: Path, tmp_path: Path) -> None:
    """The same folder behind vLLM's server and in the native engine: the same reply, the same number of tokens."""
    with vllm_server(folder, tmp_path / "log") as url:
        config = JudgeReward(name="judge", endpoint=url, model="toy", response_limit=10**6, cache=tmp_path / "cache")
        with build_reward_manager([config, JudgeReward(name="judge", path=folder)], device="cpu") as judge:
            found = judged(judge, "5", "It is 5.<|end|>")
            counters = judge.counters()
            assert found.parts == {"judge": 0.75, "judge#2": 0.75}
            for key in ("prompt_tokens", "completion_tokens", "calls"):
                assert counters[f"judge/{key}"] == counters[f"judge#2/{key}"]
            assert judged(judge, "5", "apples " * 4000).outcomes["judge"] == "too_long"
        schema = config.model_copy(update={"structured": True, "max_tokens": 64, "unparsable_reward": -1.0})
        with build_reward_manager([schema]) as judge:
            assert judged(judge, "5", "It is 5.").outcomes["judge"] in ("ok", "unparsable")
        with (
            build_reward_manager([config.model_copy(update={"model": "other", "cache": None})]) as judge,
            pytest.raises(RewardError, match=r"status 404 .+ correct `model`"),
        ):
            judged(judge, "5", "It is 5.")
    assert threading.active_count() < 50
