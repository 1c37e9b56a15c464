"""Test of `bench architectures`: rollouts and training of one tiny model against transformers' forward pass.

The reference is `AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")` in fp32 and eval mode, with
one sequence at a time, without padding, mask or cache. Rollmill's side uses `load_verified_policy`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.tiny_architectures import UNBUILT, VOCABULARY, tiny_model
from rollmill.config.model import ModelConfig, TokenizerConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest
from rollmill.engines.native import NativeEngine
from rollmill.errors import RollmillError
from rollmill.models.cpu.norms import find_norms, use_fast_norms
from rollmill.models.from_scratch import silence_transformers, train_tokenizer
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode
from rollmill.trainer.parity import load_verified_policy
from rollmill.types import Completion, Experience

GAP, GRADIENT = (
    2e-4,
    1e-2,
)  #: as at load: largest |log-prob - reference| in nats, relative L2 difference
NEW_TOKENS = 40
PROMPTS = (41, 25)  #: tokens; four completions of the first, two of the second
ROWS = ((37, (40, 23, 9)), (21, (30, 5)), (12, (50,)))  #: prompts and completions of each training row


class NotBuiltError(Exception):
    """transformers' model cannot be built, saved or run."""


@dataclass
class Finding:
    """Result for one architecture. Gaps are in nats; None if nothing was compared."""

    name: str
    model: str = ""  #: its class
    verdict: str = "right"  #: right, refused, wrong, traceback or not built
    why: str = ""
    stage: str = ""  #: stage of the refusal or failure: load, rollout or training
    rollout_gap: float | None = None
    chunked_gap: float | None = None  #: with chunked prefill, and new weights while rows run
    training_gap: float | None = None
    gradient: float | None = None  #: relative L2 difference
    parameter: str = ""  #: the parameter whose gradient differs most
    gap_bound: float = GAP
    gradient_bound: float = GRADIENT
    parameters: int = 0
    notes: list[str] = field(default_factory=list)


def judge(architecture: str, folder: Path) -> Finding:
    """Build a tiny model, save it in `folder`, load it as rollmill does and compare."""
    finding = Finding(architecture)
    try:
        reference = _built(architecture, folder, finding)
    except NotBuiltError as error:
        finding.verdict, finding.why = "not built", UNBUILT.get(architecture, str(error))
        return finding
    policy = guarded(
        finding,
        "load",
        lambda: load_verified_policy(ModelConfig(path=folder), texts=[], seed=0, device=torch.device("cpu")),
    )
    if policy is None:
        return without_folder(folder, finding)
    guarded(finding, "rollout", lambda: _compare_rollouts(policy, reference, finding))
    guarded(finding, "training", lambda: _compare_training(policy.model, reference, finding))
    _decide(finding, reference)
    return without_folder(folder, finding)


def without_folder(folder: Path, finding: Finding) -> Finding:
    """Remove the temporary folder from the reason, so that results can be compared."""
    finding.why = (
        finding.why.removeprefix("model.path: ").removeprefix(f"{folder}: ").replace(str(folder), "the folder")
    )
    return finding


def _decide(finding: Finding, reference: nn.Module) -> None:
    """Set `wrong` if a difference exceeds rounding errors, even if something else was refused."""
    gaps = [gap for gap in (finding.rollout_gap, finding.chunked_gap, finding.training_gap) if gap is not None]
    gap, gradient = max(gaps, default=0.0), finding.gradient or 0.0
    if gap <= GAP and gradient <= GRADIENT:
        return
    if gap < 10 * GAP and gradient < 10 * GRADIENT:
        _widen_bounds(finding, reference)
    if gap <= finding.gap_bound and gradient <= finding.gradient_bound:
        return
    if finding.verdict in ("right", "refused"):
        before = f"; {finding.stage} refused: {finding.why}" if finding.verdict == "refused" else ""
        finding.verdict, finding.why = "wrong", (_differences(finding) + before)


def _differences(finding: Finding) -> str:
    parts = [("rollout", finding.rollout_gap), ("rollout in chunks", finding.chunked_gap)]
    parts.append(("training", finding.training_gap))
    found = [f"{name} {gap:.2g} nats" for name, gap in parts if gap is not None and not gap <= finding.gap_bound]
    if finding.gradient is not None and not finding.gradient <= finding.gradient_bound:
        found.append(f"gradient {finding.gradient:.1%} ({finding.parameter})")
    return ", ".join(found)


def _widen_bounds(finding: Finding, reference: Any) -> None:
    """Widen the bounds for an ill-conditioned model: four times the reference's own error of fp32 against float64."""
    try:
        experiences = _experiences()
        single, single_grads = _reference_pass(reference, experiences)
        double, double_grads = _reference_pass(copy.deepcopy(reference).double(), experiences)
    except (RuntimeError, TypeError) as error:
        finding.notes.append(f"no float64 reference: {error}"[:200])
        return
    finding.gap_bound = max(GAP, 4 * float((single - double).abs().max()))
    finding.gradient_bound = max(GRADIENT, 4 * _difference(single_grads, double_grads)[0])


def guarded(finding: Finding, stage: str, work: Callable[[], Any]) -> Any:
    """Run `work`; None if it failed. The first failure decides, but an unexpected one overrides a refusal."""
    try:
        return work()
    except RollmillError as error:
        if finding.verdict == "right":
            finding.verdict, finding.why, finding.stage = "refused", str(error), stage
    except Exception as error:
        if finding.verdict != "traceback":
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "/rollmill/" in frame.filename] or frames
            places = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (own[-1], frames[-1]))
            finding.verdict, finding.stage = "traceback", stage
            finding.why = f"{type(error).__name__}: {str(error)[:300]} ({places})"
    return None


# -- the model and its reference -------------------------------------------------------------------------------------


def _built(architecture: str, folder: Path, finding: Finding) -> Any:
    """Build and save a tiny model, and load it as the reference."""
    tokens = torch.tensor([_tokens(np.random.default_rng(1), 100).tolist()])
    try:
        with silence_transformers():
            model: Any = tiny_model(architecture)
            finding.model = type(model).__name__
            finding.parameters = sum(parameter.numel() for parameter in model.parameters())
            logits = _logits(model, tokens)
            if not bool(logits.isfinite().all()):
                raise NotBuiltError("its logits are not finite")
            model.save_pretrained(folder)
            _tokenizer().save_pretrained(folder)
            reference = _read(folder, type(model), finding)
            read = _logits(reference, tokens)
            if not torch.allclose(read, logits, atol=1e-4):
                off = float((read - logits).abs().max())
                finding.notes.append(f"transformers reads it back with other logits ({off:.1g})")
            short = _logits(reference, tokens[:, :57])
            if not torch.allclose(short.log_softmax(-1), read[:57].log_softmax(-1), atol=1e-3):
                off = float((short.log_softmax(-1) - read[:57].log_softmax(-1)).abs().max())
                finding.notes.append(f"its own log-probs depend on later tokens ({off:.1g} nats)")
    except NotBuiltError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise NotBuiltError(
            f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})"
        ) from error
    return reference


def _read(folder: Path, kind: Any, finding: Finding) -> Any:
    """Load the checkpoint with AutoModelForCausalLM; if that fails, with the model's class."""
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    try:
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except ValueError:
        finding.notes.append("AutoModelForCausalLM makes this model, but cannot read it back")
        return kind.from_pretrained(folder, **options).eval()


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    return logits


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    return train_tokenizer(TokenizerConfig(kind="char"), ["".join(map(chr, range(32, 127)))])


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    return rng.integers(8, VOCABULARY, count).astype(np.int32)


# -- rollouts --------------------------------------------------------------------------------------------------------


def _compare_rollouts(policy: Any, reference: Any, finding: Finding) -> None:
    completions = asyncio.run(_rolled_out(policy, prefill_tokens=2048, update=lambda: None))
    finding.rollout_gap = _rollout_gap(completions, [reference])
    changed = copy.deepcopy(reference)
    _shift(changed)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    try:
        completions = asyncio.run(_rolled_out(policy, prefill_tokens=16, update=lambda: _shift(policy.model)))
    finally:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(before[name])
    versions = {int(version) for completion in completions for version in completion.versions}
    assert versions == {0, 1}, f"new weights should have come while completions were running, not {versions}"
    finding.chunked_gap = _rollout_gap(completions, [reference, changed])


async def _rolled_out(policy: Any, *, prefill_tokens: int, update: Callable[[], None]) -> list[Completion]:
    """Roll out completions of both prompts together; `update` changes the weights meanwhile."""
    engine = NativeEngine(
        policy.model, policy.tokenizer, context=policy.context, max_sequences=16, prefill_tokens=prefill_tokens
    )
    rng = np.random.default_rng(2)
    requests = [
        GenerationRequest(_tokens(rng, length).tolist(), SamplingConfig(max_new_tokens=NEW_TOKENS), n=n, seed=n)
        for length, n in zip(PROMPTS, (4, 2), strict=True)
    ]
    running = asyncio.gather(*(engine.generate(request) for request in requests))
    for _ in range(24):
        await asyncio.sleep(0)
    if not running.done():
        update()
        engine.weights_updated(1)
    found = [completion for group in await running for completion in group]
    await engine.close()
    return found


@torch.no_grad()
def _shift(model: nn.Module) -> None:
    """Change all weights, identically in every model of this architecture."""
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(len(name))
        parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))


def _rollout_gap(completions: Sequence[Completion], references: Sequence[Any]) -> float:
    """Largest difference between a recorded log-prob and that of the reference with the same version."""
    gap = 0.0
    for completion in completions:
        tokens = torch.tensor(np.concatenate([completion.prompt_ids, completion.token_ids]).astype(np.int64))[None]
        start = len(completion.prompt_ids)
        for version, reference in enumerate(references):
            own = completion.versions == version if len(references) > 1 else np.ones(len(completion.versions), bool)
            if not own.any():
                continue
            expected = _logits(reference, tokens)[start - 1 : -1].log_softmax(-1).gather(1, tokens[0, start:, None])
            difference = np.abs(expected[:, 0].numpy() - completion.logprobs)[own]
            gap = max(gap, float(np.nan_to_num(difference, nan=np.inf).max()))
    return gap


# -- training --------------------------------------------------------------------------------------------------------


def _compare_training(model: Any, reference: Any, finding: Finding) -> None:
    experiences = _experiences()
    expected, expected_grads = _reference_pass(reference, experiences)
    table = build_token_table(experiences, torch.device("cpu"))
    found = torch.zeros_like(expected)
    weights = _loss_weights(len(expected))
    model.zero_grad(set_to_none=True)
    with _as_trained(model):
        for micro in build_micro_batches(experiences, table, range(len(experiences)), 8192, torch.device("cpu")):
            with use_packed_attention(model, micro):
                logprob, _ = compute_logprobs(model, micro, table)
                (logprob * weights[micro.tokens]).sum().backward()
            found[micro.tokens] = logprob.detach()
    finding.training_gap = float((found - expected).abs().nan_to_num(nan=torch.inf).max())
    finding.gradient, finding.parameter = _difference(_gradients(model), expected_grads)


@contextmanager
def _as_trained(model: Any) -> Iterator[None]:
    """Put the model into the trainer's state during a pass."""
    with evaluation_mode(model), use_fast_norms(find_norms(model)):
        yield


def _experiences() -> list[Experience]:
    """Several prompts with completions of different lengths, one of them with an observation in the middle."""
    rng = np.random.default_rng(3)
    batch = []
    for number, (length, completions) in enumerate(ROWS):
        prompt = _tokens(rng, length)
        for index, new in enumerate(completions):
            mask = np.arange(length + new) >= length
            if index == 1:
                mask[length + 3 : length + 7] = False
            batch.append(
                Experience(
                    id=f"{number}-{index}",
                    task_id=str(number),
                    group=str(number),
                    token_ids=np.concatenate([prompt, _tokens(rng, new)]),
                    action_mask=mask,
                    logprobs=np.zeros(length + new, np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    temperature=0.8 if number == 1 else 1.0,
                )
            )
    return batch


def _reference_pass(reference: Any, experiences: Sequence[Experience]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all action tokens, [A], and gradients of their weighted sum, by plain autograd."""
    reference.zero_grad(set_to_none=True)
    logprobs, start = [], 0
    weights = _loss_weights(sum(each.action_tokens for each in experiences))
    for each in experiences:
        tokens = torch.tensor(each.token_ids.astype(np.int64))[None]
        at = torch.tensor(each.action_mask.nonzero()[0])
        logits = reference(input_ids=tokens, use_cache=False).logits[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        own = (logits[at - 1] / each.temperature).log_softmax(-1).gather(1, tokens[0, at, None])[:, 0]
        (own * weights[start : start + len(at)]).sum().backward()
        start += len(at)
        logprobs.append(own.detach())
    grads = _gradients(reference)
    reference.zero_grad(set_to_none=True)
    return torch.cat(logprobs), grads


def _loss_weights(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(4))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """|found - expected| / |expected| over all parameters, and the parameter that differs most."""
    squares: dict[str, float] = {}
    for name in found.keys() | expected.keys():
        ours, theirs = found.get(name), expected.get(name)
        off = ours - theirs if ours is not None and theirs is not None else (ours if theirs is None else theirs)
        assert off is not None
        squares[name] = float(off.double().square().sum().nan_to_num(nan=torch.inf))
    total = sum(float(theirs.double().square().sum()) for theirs in expected.values())
    return (sum(squares.values()) / total) ** 0.5, max(squares, key=lambda name: squares[name])
