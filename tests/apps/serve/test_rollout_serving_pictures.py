"""Clients that send pictures, in three protocols: exact tokens and pictures are recorded, and the sessions train."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from support.endpoints import KEY, Running, running
from support.picture_models import picture_checkpoint

import rollmill
from rollmill.apps.serve.endpoint import pictures as endpoint_pictures
from rollmill.config.model import ModelConfig
from rollmill.data.images import PictureFolder
from rollmill.data.picture_turns import join_turns, turns_of
from rollmill.engines.native.engine import NativeEngine
from rollmill.models.load import PolicyModel, load_policy
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.types import Experience

CPU = torch.device("cpu")
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    config = ModelConfig(path=picture_checkpoint(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl"))
    found = load_policy(config, texts=[], seed=0, device=CPU, pictures=True)
    found.model.picture_processor.folder = tmp_path_factory.mktemp("pictures")
    return found


@pytest.fixture(scope="module")
def site(model: PolicyModel) -> Iterator[Running]:
    engine = NativeEngine(model.model, model.tokenizer, eos_ids=model.eos_ids, context=model.context)
    with running(made=(engine, model.tokenizer), max_new_tokens=6) as made:
        yield made


def png(width: int, height: int, seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def url(*size: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(*size)).decode()}"


def committed(site: Running, session: str) -> list[Experience]:
    answer = httpx.post(
        f"{site.address}/feedback", json={"session": session, "reward": 1, "commit": True}, headers=HEADERS
    )
    assert answer.status_code == 200, answer.text
    return site.kept.finished[-1].experiences


def check_logprobs(model: PolicyModel, experiences: list[Experience]) -> None:
    """The trainer's log-probs of what was recorded, with the recorded pictures, are those of the engine."""
    processor = model.model.picture_processor
    for each in experiences:
        turns = turns_of(each)
        assert turns is not None
        each.pictures = join_turns(processor, each.token_ids.tolist(), turns, each.id)
    table = build_token_table(experiences, CPU)
    found = torch.zeros(len(table.target))
    for micro in build_micro_batches(experiences, table, range(len(experiences)), 4096, CPU):
        with torch.no_grad(), use_packed_attention(model.model, micro):
            found[micro.tokens] = compute_logprobs(model.model, micro, table)[0]
    assert (found - table.rollout_logprob).abs().max() < 1e-4


def test_openais_client_shows_pictures_in_several_turns(model: PolicyModel, site: Running) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=site.base_url, api_key=f"{KEY}:talk", max_retries=0)
    first = [
        {"type": "text", "text": "what is "},
        {"type": "image_url", "image_url": {"url": url(56, 28, 0), "detail": "low"}},
        {"type": "text", "text": "?"},
    ]
    talk: list[Any] = [{"role": "user", "content": first}]
    said = client.chat.completions.create(model="", messages=talk, logprobs=True, seed=1)
    talk += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "really?"}]
    again = client.chat.completions.create(model="", messages=talk, seed=2)
    talk += [again.choices[0].message.model_dump(exclude_none=True)]
    talk += [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(28, 56, 1)}}]}]
    streamed = client.chat.completions.create(
        model="", messages=talk, stream=True, stream_options={"include_usage": True}, seed=3
    )
    last = list(streamed)[-1].usage
    assert last is not None
    [made] = committed(site, "talk")
    assert [turn.role for turn in made.turns] == [
        "prompt",
        "assistant",
        "observation",
        "assistant",
        "observation",
        "assistant",
    ]
    assert last.prompt_tokens == made.turns[-1].start
    assert [each["width"] for each in made.info["images"]] == [56, 28]
    assert all(Path(each["path"]).parent == model.model.picture_processor.folder for each in made.info["images"])
    processor = model.model.picture_processor
    shown = made.token_ids[~made.action_mask]  # the policy may sample a picture token, which is text
    assert (shown == processor.image_token_id).sum() == 4  # two per picture
    assert said.choices[0].logprobs is not None
    check_logprobs(model, [made])


def test_three_protocols_record_the_same_pictures(model: PolicyModel, site: Running) -> None:
    shown = url(42, 42, 5)
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "openai": (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": "?"}],
                    }
                ]
            },
        ),
        "responses": (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": shown}, {"type": "input_text", "text": "?"}],
                    }
                ]
            },
        ),
        "anthropic": (
            "/v1/messages",
            {
                "max_tokens": 6,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": shown.partition(",")[2],
                                },
                            },
                            {"type": "text", "text": "?"},
                        ],
                    }
                ],
            },
        ),
    }
    made = []
    for name, (path, body) in bodies.items():
        answer = httpx.post(
            f"{site.address}{path}",
            json={"model": "", "seed": 1, **body},
            headers=HEADERS | {"x-session-id": name},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        made += committed(site, name)
    counted = httpx.post(
        f"{site.address}/v1/messages/count_tokens",
        json={"model": "", "messages": bodies["anthropic"][1]["messages"]},
        headers=HEADERS,
    )
    assert counted.json()["input_tokens"] == made[0].turns[0].end
    assert len({tuple(each.token_ids.tolist()) for each in made}) == 1
    assert len({each.info["images"][0]["sha256"] for each in made}) == 1
    prompts = [each.prompt for each in site.kept.finished[-3:]]
    assert len(set(prompts)) == 1
    assert made[0].info["images"][0]["sha256"] in prompts[0]  # sessions on other pictures are not compared with it
    check_logprobs(model, made)


def test_a_response_goes_on_from_its_id_and_tools_may_show_pictures(model: PolicyModel, site: Running) -> None:
    def ask(body: dict[str, Any]) -> dict[str, Any]:
        json = {"model": "", "seed": 1} | body  # sampled picture tokens would fork the session
        answer = httpx.post(f"{site.base_url}/responses", json=json, headers=HEADERS, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    first = ask({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(28, 28, 7)}]}]})
    output = [{"type": "input_image", "image_url": url(56, 56, 8)}, {"type": "input_text", "text": "seen"}]
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": output}
    second = ask({"previous_response_id": first["id"], "input": [call, result]})
    ask({"previous_response_id": second["id"], "input": "so?"})
    answer = httpx.post(
        f"{site.address}/feedback", json={"completion": second["id"], "reward": 1, "commit": True}, headers=HEADERS
    )
    assert answer.status_code == 200, answer.text
    made = site.kept.finished[-1].experiences
    assert [len(each.info["images"]) for each in made] == [2]
    check_logprobs(model, made)


TOOL = {
    "type": "tool_result",
    "tool_use_id": "a",
    "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}],
}


CHAT = "/v1/chat/completions"


def image(given: Any) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": given}]


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        (CHAT, image({"url": "https://a/b.png"}), "nothing is fetched"),
        (CHAT, image({"url": "/etc/passwd"}), "nothing is fetched"),
        (CHAT, image(None), "without `image_url`"),
        (CHAT, image("data:image/png;base64,AAAA"), "is not an image"),
        (CHAT, image("data:text/plain,a"), "not an image as data"),
        (CHAT, [{"type": "image_url", "image": {"path": "/etc/passwd"}}], "without `image_url`"),
        (CHAT, [{"type": "input_audio", "input_audio": {}}], "audio, which is not supported"),
        (CHAT, [*image(url(28, 28, 1)), {"type": "text", "text": "<|image_pad|>"}], "texts must not contain"),
        ("/v1/responses", [{"type": "input_image", "file_id": "file-1"}], "without `image_url`"),
        ("/v1/messages", [TOOL], "nothing is fetched"),
        ("/v1/messages", [{"type": "image", "source": {"type": "file", "file_id": "a"}}], "base64 with `media_type`"),
        ("/v1/messages", [{"type": "document", "source": {}}], "send texts and pictures"),
    ],
)
def test_what_cannot_be_seen_is_refused(site: Running, path: str, content: Any, says: str) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    body = {"model": "", "max_tokens": 4, key: [{"role": "user", "content": content}]}
    if path == "/v1/responses":
        del body["max_tokens"]
    answer = httpx.post(site.address + path, json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


def test_other_kinds_and_sizes_of_pictures_are_refused(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*shown: str) -> httpx.Response:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in shown]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        return httpx.post(f"{site.base_url}/chat/completions", json=body, headers=HEADERS, timeout=60)

    bitmap = f"data:image/bmp;base64,{base64.b64encode(png(8, 8, 0, 'BMP')).decode()}"
    assert "image/bmp; send one of image/png" in ask(bitmap).json()["error"]["message"]
    monkeypatch.setattr(endpoint_pictures, "MAX_PIXELS", 28 * 28)
    assert ask(url(28, 28, 0)).status_code == 200
    answer = ask(url(28, 28, 0), url(28, 28, 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert "scale them down" in answer.json()["error"]["message"]


def test_texts_show_no_pictures(site: Running, model: PolicyModel) -> None:
    for prompt in ("a <|image_pad|>", [5, model.model.picture_processor.image_token_id]):
        answer = httpx.post(f"{site.base_url}/completions", json={"prompt": prompt}, headers=HEADERS, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content")


def test_a_model_that_reads_text_says_so() -> None:
    parts = [{"type": "image_url", "image_url": {"url": url(28, 28, 0)}}]
    with running() as site:
        body = {"messages": [{"role": "user", "content": parts}]}
        answer = httpx.post(f"{site.base_url}/chat/completions", json=body, headers=HEADERS)
    assert answer.status_code == 400
    assert "a picture; this model reads text only" in answer.json()["error"]["message"]


def test_a_bounded_folder_keeps_the_newest_pictures(tmp_path: Path) -> None:
    one = len(png(28, 28, 0))
    folder = PictureFolder(tmp_path, most_bytes=3 * one)
    refs = [folder.keep(png(28, 28, seed), "a picture") for seed in range(12)]
    left = {each.name for each in tmp_path.iterdir()}
    assert refs[-1].sha256 in left
    assert refs[0].sha256 not in left
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 3 * one + one


def test_a_served_checkpoint_keeps_recorded_pictures_only_where_it_records(tmp_path: Path) -> None:
    folder, body = picture_checkpoint(tmp_path / "model", "llava"), {"max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": image(url(28, 28, 3))}]}
    for record in (None, tmp_path / "record"):
        with rollmill.serve(folder, record=record) as server:
            head = {"authorization": f"Bearer {server.key}:one"}
            answer = httpx.post(f"{server.url}/chat/completions", json=body, headers=head, timeout=60)
            assert answer.status_code == 200, answer.text
            kept = server._policy.model.picture_processor.folder
            assert len(list(kept.iterdir())) == 1
            if record is not None:
                reward = {"session": "one", "reward": 1, "commit": True}
                httpx.post(f"{server.url.removesuffix('/v1')}/feedback", json=reward, headers=head)
        assert kept.is_dir() == (record is not None)
    [made] = rollmill.load_experiences(tmp_path / "record")
    assert [each["path"] for each in made.info["images"]] == [str(each) for each in kept.iterdir()]
