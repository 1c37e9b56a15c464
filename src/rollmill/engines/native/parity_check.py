"""Parity check: compares the log-probs that the engine records with those of the model's own forward pass.

One run covers everything that stores keys, values and states: chunked prompts, several completions per prompt,
decoding, and weights that change in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollmill.config.rollout import SamplingConfig
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native.engine import NativeEngine
from rollmill.errors import ModelError
from rollmill.models.hf_forward import (
    LogprobGap,
    find_first_difference,
    hf_layer_outputs,
    hf_logprobs,
    logprob_tolerance,
    picture_prompts,
    random_prompts,
    record_layer_outputs,
    shrink_model,
)
from rollmill.types import Completion

PROMPT_LENGTHS = (29, 14)  #: tokens; the first exceeds one prefill chunk
NUM_NEW_TOKENS = 14  #: tokens per completion
_PIECE, _COMPLETIONS = 16, 2
_TRIES = 50


def check_engine_parity(model: Any, folder: Path) -> None:
    """Check the engine alone, for a model that is not trained.

    Raises:
        ModelError: the engine's results differ from the model's, or it cannot run the model.
    """
    with shrink_model(model), wrap_model_errors(model, folder):
        gap, _ = measure_engine_gap(model)
    if not gap.right:
        raise parity_error(folder, model, [gap])


def parity_error(folder: Path, model: Any, gaps: list[LogprobGap]) -> ModelError:
    """Build the ModelError for a model with wrong results."""
    details = "; ".join(
        f"{gap.path} {gap.value:.2g} off (rounding gives at most {gap.tolerance:.0e})"
        + (f", from {gap.layer} on" if gap.layer else "")
        for gap in gaps
    )
    return ModelError(
        f"model.path: {folder}: {type(model).__name__} would not be computed as transformers computes it: {details}; "
        "choose another architecture (docs/guide/models.md lists those that can be trained)"
    )


@contextmanager
def wrap_model_errors(model: Any, folder: Path) -> Iterator[None]:
    """Turn errors of a model's code on rollmill's inputs into a ModelError that names the folder."""
    try:
        with torch.no_grad():
            hf_logprobs(model, random_prompts(model, (4,)), 1)
    except Exception as error:  # whatever a model's code raises
        raise ModelError(f"model.path: {folder}: the model's own forward pass fails: {error}") from error
    training = model.training
    try:
        yield
    except ModelError as error:
        raise ModelError(f"model.path: {folder}: {error}") from error
    except Exception as error:  # as above
        raise ModelError(
            f"model.path: {folder}: rollmill cannot run {type(model).__name__} ({type(error).__name__}: {error}); "
            "choose another architecture (docs/guide/models.md lists those that can be trained)"
        ) from error
    finally:
        model.train(training)


def measure_engine_gap(model: Any) -> tuple[LogprobGap, list[list[Completion]]]:
    """Compare the log-probs that the engine records with the model's own; `model` comes from `shrink_model`.

    Returns:
        the largest gap in nats, and the completions of each prompt: of random ones, then of `picture_prompts`.
    """
    prompts, seen = random_prompts(model, PROMPT_LENGTHS), picture_prompts(model)
    found = _generated(model, prompts, _COMPLETIONS, seen)
    worst = 0.0
    with torch.no_grad():
        for i, completions in enumerate(found):
            pictures = seen[i - len(prompts)] if i >= len(prompts) else None
            own = hf_completion_logprobs(model, completions, pictures)
            recorded = torch.from_numpy(np.concatenate([each.logprobs for each in completions])).to(own)
            worst = _larger(worst, float((own - recorded).abs().max()))
    gap = LogprobGap("engine: prefill and decode", worst, logprob_tolerance(model))
    return (gap if gap.right else LogprobGap(gap.path, worst, gap.tolerance, _layer(model, prompts[0]))), found


def hf_completion_logprobs(model: Any, completions: list[Completion], pictures: PicturePrompt | None) -> torch.Tensor:
    """Log-probs of the new tokens of a prompt's completions by the model's own forward pass, one after the other."""
    ids = [[*each.prompt_ids.tolist(), *each.token_ids.tolist()] for each in completions]
    if pictures is None:
        return hf_logprobs(model, ids, NUM_NEW_TOKENS).flatten()
    return torch.cat([hf_logprobs(model, [each], NUM_NEW_TOKENS, pictures)[0] for each in ids])


def _generated(
    model: Any, prompts: list[list[int]], count: int, seen: list[PicturePrompt] | None = None
) -> list[list[Completion]]:
    """Generate `count` completions of each prompt with a paused engine, stepped here.

    A completion of a prompt with pictures that has a picture token, which the model's own forward pass refuses, is
    generated again.
    """
    found = _attempt(model, prompts, count, [], 0)
    for pictures in seen or []:
        token = model.picture_processor.image_token_id
        for seed in range(_TRIES):
            [own] = _attempt(model, [pictures.token_ids], count, [pictures], seed)
            if not any(token in each.token_ids for each in own):
                break
        found.append(own)
    return found


def _attempt(
    model: Any, prompts: list[list[int]], count: int, seen: list[PicturePrompt], seed: int
) -> list[list[Completion]]:
    engine = NativeEngine(
        model,
        eos_ids=frozenset(),
        context=max(map(len, prompts)) + NUM_NEW_TOKENS,
        dtype=next(model.parameters()).dtype,
        prefill_tokens=_PIECE,
    )
    engine.pause()
    sampling = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS)
    groups = [
        engine.submit(GenerationRequest(ids, sampling, n=count, seed=seed + i, pictures=seen[i] if seen else None))
        for i, ids in enumerate(prompts)
    ]
    steps = 0
    while any(group.unfinished for group in groups):
        engine.core.step()
        steps += 1
        if steps == NUM_NEW_TOKENS // 2:
            engine.weights_updated(1)
    found: list[list[Completion]] = []
    for group in groups:
        results = [group.results.get_nowait() for _ in range(count)]
        found.append(sorted((each for each in results if isinstance(each, Completion)), key=lambda each: each.index))
    return found


def _layer(model: Any, prompt: list[int]) -> str:
    """Name the first layer whose outputs differ, from a single completion: its passes are its tokens in order."""
    engine = NativeEngine(
        model, eos_ids=frozenset(), context=max(PROMPT_LENGTHS) + NUM_NEW_TOKENS, dtype=next(model.parameters()).dtype
    )
    engine.pause()
    with record_layer_outputs(engine.core.weights.model) as outputs:
        group = engine.submit(GenerationRequest(prompt, SamplingConfig(max_new_tokens=NUM_NEW_TOKENS)))
        while group.unfinished:
            engine.core.step()
    completion = group.results.get_nowait()
    assert isinstance(completion, Completion)
    read = prompt + completion.token_ids.tolist()[:-1]
    return find_first_difference(
        model, hf_layer_outputs(model, read), [torch.cat(each)[: len(read)] for each in outputs]
    )


def _larger(a: float, b: float) -> float:
    """Return the larger one; NaN counts as the largest."""
    return b if not b <= a else a
