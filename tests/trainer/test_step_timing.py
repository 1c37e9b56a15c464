"""The choice of compute type and threads, by the products of a step: on this machine, and on simulated ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollmill.models.cpu.step_timing import (
    Product,
    StepSize,
    Timer,
    choose_precision,
    choose_threads,
    step_products,
    time_product,
)

SIZE = StepSize(sequences=64, decoded=56, learned=64 * 56, row=2048)
"""64 completions of 56 tokens."""


@pytest.fixture(scope="module")
def small_chat_model() -> LlamaForCausalLM:
    """The shapes of SmolLM2-135M: narrow layers under a vocabulary of 49,152."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def machine(fp32: Callable[[Product], float], bf16: Callable[[Product], float]) -> Timer:
    """Times products by their operations and by rates in operations per second."""

    def timer(product: Product, dtypes: tuple[torch.dtype | None, ...]) -> list[float]:
        operations = product.wide * product.narrow * product.rows
        return [operations / (fp32 if dtype is None else bf16)(product) for dtype in dtypes]

    return timer


def test_a_step_decodes_and_learns_through_every_layer(small_chat_model: Any) -> None:
    products = step_products(small_chat_model, SIZE)
    # q and o, k and v, gate and up, down, head
    counts = {(576, 576): 60, (192, 576): 60, (1536, 576): 60, (576, 1536): 30, (49152, 576): 1}
    decoding = {Product(*shape, rows=64, learns=False): count * 56 for shape, count in counts.items()}
    learning = {Product(*shape, rows=2048, learns=True): count * 1.75 for shape, count in counts.items()}
    assert products == decoding | learning


def test_steps_without_rollouts_or_without_learning(small_chat_model: Any) -> None:
    learning = step_products(small_chat_model, StepSize.of_training(micro_batch_tokens=512))
    assert {(each.rows, each.learns) for each in learning} == {(512, True)}
    assert learning[Product(49152, 576, 512, learns=True)] == 4  # passes of 2,048 rows
    generating = step_products(small_chat_model, StepSize.of_generation(sequences=5))
    assert {(each.rows, each.learns) for each in generating} == {(5, False)}


def test_one_wide_layer_does_not_decide(small_chat_model: Any) -> None:
    """bf16 is slow for the output embedding alone, where the cast of its weights dominates."""
    timer = machine(lambda _: 100e9, lambda product: 50e9 if product.wide == 49152 else 200e9)
    assert choose_precision(small_chat_model, "cpu", SIZE, timer) == "bf16"


def test_types_are_compared_over_the_whole_step(small_chat_model: Any) -> None:
    """bf16 doubles the speed of learning and is slow in decoding: what the step does more of decides."""
    timer = machine(lambda _: 100e9, lambda product: 200e9 if product.learns else 20e9)
    long = StepSize(sequences=64, decoded=56, learned=64 * 56, row=2048)
    prompts = StepSize(sequences=64, decoded=2, learned=64 * 56, row=2048)
    assert choose_precision(small_chat_model, "cpu", long, timer) == "fp32"
    assert choose_precision(small_chat_model, "cpu", prompts, timer) == "bf16"


def test_a_gain_below_a_tenth_is_not_worth_bf16(small_chat_model: Any) -> None:
    assert choose_precision(small_chat_model, "cpu", SIZE, machine(lambda _: 100e9, lambda _: 108e9)) == "fp32"
    assert choose_precision(small_chat_model, "cpu", SIZE, machine(lambda _: 100e9, lambda _: 115e9)) == "bf16"


def test_threads_double_while_they_help(small_chat_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    before = torch.get_num_threads()
    speed = {1: 1.0, 2: 1.9, 4: 2.0, 8: 8.0}
    timer = machine(lambda _: 1e9 * speed[torch.get_num_threads()], lambda _: 1e8)
    assert choose_threads(small_chat_model, SIZE, timer) == 2
    assert torch.get_num_threads() == before


def test_what_was_measured_on_a_machine_decides_later_runs(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, size = toy("qwen3"), StepSize(sequences=2, decoded=3, learned=5)
    first, chosen = tmp_path / "fp32", {}
    monkeypatch.setenv("ROLLMILL_CACHE", str(first))
    choose_precision(model, "cpu", size)
    records = sorted((first / "timings").glob("*.json"))
    assert len(records) == len(step_products(model, size))
    for wanted, seconds in (("fp32", [1.0, 2.0]), ("bf16", [2.0, 1.0])):
        folder = tmp_path / f"changed {wanted}"
        (folder / "timings").mkdir(parents=True)
        for each in records:
            (folder / "timings" / each.name).write_text(json.dumps(json.loads(each.read_text()) | {"seconds": seconds}))
        monkeypatch.setenv("ROLLMILL_CACHE", str(folder))
        chosen[wanted] = choose_precision(model, "cpu", size)
    assert chosen == {"fp32": "fp32", "bf16": "bf16"}


@pytest.mark.parametrize("damage", ["not JSON", "{}", '{"of": [], "seconds": [1, 2]}', None])
def test_a_damaged_or_unwritable_record_is_measured_again(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    model, size, cache = toy("qwen3"), StepSize(sequences=2, decoded=3, learned=7), tmp_path / "cache"
    if damage is None:
        cache.write_text("a file in place of the folder")
    else:
        monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "other"))
        choose_precision(model, "cpu", size)
        for each in (tmp_path / "other" / "timings").glob("*.json"):
            cache.joinpath("timings").mkdir(parents=True, exist_ok=True)
            (cache / "timings" / each.name).write_text(damage)
    monkeypatch.setenv("ROLLMILL_CACHE", str(cache))
    assert choose_precision(model, "cpu", size) in ("fp32", "bf16")


def test_this_machine_is_measured_once(toy: Any) -> None:
    model, size = toy("qwen3"), StepSize(sequences=3, decoded=2, learned=6)
    before, state = torch.get_num_threads(), torch.get_rng_state()
    assert choose_precision(model, "cpu", size) in ("fp32", "bf16")
    for product in step_products(model, size):
        assert time_product(product, (None, torch.bfloat16)) is time_product(product, (None, torch.bfloat16))
    assert choose_precision(model, "cuda", size) == "bf16"
    assert choose_threads(model, size) >= 1
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
