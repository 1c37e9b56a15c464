"""Verifies a checkpoint at load: compares engine and trainer with the model's own forward pass in transformers.

Engine and trainer use their own attention. If an architecture does something that neither implements, both are wrong in
the same way and their log-probs still agree. So each is compared with transformers instead of with the other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import rollmill
from rollmill.config.model import ModelConfig
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.engines.native.parity_check import (
    hf_completion_logprobs,
    measure_engine_gap,
    parity_error,
    wrap_model_errors,
)
from rollmill.errors import ModelError
from rollmill.files import cache_folder
from rollmill.models.cpu.norms import find_norms, use_fast_norms
from rollmill.models.hf_forward import (
    LogprobGap,
    find_first_difference,
    hf_layer_outputs,
    logprob_tolerance,
    picture_prompts,
    record_layer_outputs,
    shrink_model,
)
from rollmill.models.load import PolicyModel, load_policy
from rollmill.models.lora import has_lora
from rollmill.models.storage import ensure_own_memory, leave_in_files
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.logprobs import compute_hidden_states, compute_logprobs, use_packed_attention
from rollmill.trainer.model_setup import evaluation_mode
from rollmill.types import Completion, Experience

log = logging.getLogger(__name__)

_GRADIENT_TOLERANCE = 1e-2
_GRADIENTS = 300_000_000  # parameters up to which gradients are compared
_EXACT = 500_000_000  # parameters up to which a failure is re-checked in float64
_PART = 1 << 22  # elements of a gradient that are summed at a time
_BUDGET = 4096  # tokens of a row: all sequences share one
_BF16_TOLERANCE = 0.15
"""Mean difference of a log-prob in bf16 from that in fp32, in nats. Rounding makes some hundredths, a kernel that
attends to other tokens far more."""


def load_verified_policy(
    config: ModelConfig,
    *,
    texts: Iterable[str] | Callable[[], Iterable[str]],
    seed: int,
    device: torch.device,
    pictures: bool = False,
    dtype: torch.dtype = torch.float32,
    stays_in_files: bool = False,
) -> PolicyModel:
    """Loads a policy, and verifies it if it comes from a folder; arguments as in `load_policy`.

    With `stays_in_files` its parameters are StoredParameters then.

    Raises:
        ModelError: see `load_policy` and `require_parity`.
    """
    where = {"device": device, "dtype": dtype, "stays_in_files": stays_in_files}
    policy = load_policy(config, texts=texts, seed=seed, pictures=pictures, **where)  # type: ignore[arg-type]
    if isinstance(config.path, Path):
        require_parity(policy.model, config.path)
        if stays_in_files:
            leave_in_files(policy.model, dtype)
    return policy


def require_parity(model: Any, folder: Path) -> None:
    """Verifies the model of a checkpoint folder, unless one with the same configuration and shapes has passed before.

    Raises:
        ModelError: the results of engine or trainer differ from the model's, or they cannot run it.
    """
    record = cache_folder("models") / f"{_digest(model, folder)}.json"
    if record.is_file():
        return
    gaps = check_parity(model, folder)
    wrong = [gap for gap in gaps if not gap.right]
    if wrong:
        raise parity_error(folder, model, wrong)
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps([asdict(gap) for gap in gaps]))
    except OSError as error:
        log.warning("the check of %s cannot be remembered, so it is made at every load: %s", folder, error)


def check_parity(model: Any, folder: Path) -> list[LogprobGap]:
    """Compares the engine, the trainer's forward pass and its gradient with the model's own.

    A gap that closes in float64 is a rounding error; its float64 value is returned.

    Raises:
        ModelError: the model cannot be run by one of them.
    """
    with shrink_model(model), _in_float32(model), _unfrozen(model):
        gaps = _gaps(model, folder)
        small = sum(p.numel() for p in model.parameters()) <= _EXACT
        if small and not all(gap.right for gap in gaps) and next(model.parameters()).dtype == torch.float32:
            gaps = _without_rounding(model, folder, gaps)
    return gaps


@contextmanager
def _unfrozen(model: Any) -> Iterator[None]:
    """Enables gradients of all parameters: a teacher's are frozen, but the same folder may be trained later.

    With adapters, which are checked by themselves, all else stays frozen.
    """
    frozen = [each for each in model.parameters() if each.is_floating_point() and not each.requires_grad]
    frozen = [] if has_lora(model) else frozen
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


def _without_rounding(model: Any, folder: Path, gaps: list[LogprobGap]) -> list[LogprobGap]:
    """Repeats the check in float64 and takes its gaps where they are a hundred times smaller: those were rounding
    errors.
    """
    try:
        with _in_float64(model):
            exact = _gaps(model, folder)
    except ModelError:  # the model computes in float32 whatever the type of its weights
        return gaps
    rounded = [replace(gap, value=a.value, layer="") for a, gap in zip(exact, gaps, strict=False)]
    return [b if b.value < a.value / 100 else a for a, b in zip(gaps, rounded, strict=False)] + gaps[len(rounded) :]


def _gaps(model: Any, folder: Path) -> list[LogprobGap]:
    with wrap_model_errors(model, folder):
        engine, completions = measure_engine_gap(model)
        return [engine, *_trainer_gaps(model, completions)]


def _trainer_gaps(model: Any, completions: list[list[Completion]]) -> list[LogprobGap]:
    """Compares packed rows with shared prompts, in training mode: log-probs and the gradient of a weighted
    sum of them.
    """
    device = next(model.parameters()).device
    prompts = picture_prompts(model)
    seen: list[PicturePrompt | None] = [None] * (len(completions) - len(prompts))
    seen += prompts
    experiences = [
        _experience(each, i, pictures)
        for i, (group, pictures) in enumerate(zip(completions, seen, strict=True))
        for each in group
    ]
    table = build_token_table(experiences, device)
    weights = torch.randn(len(table.target), generator=torch.Generator().manual_seed(0)).to(device)
    with_gradient = sum(p.numel() for p in model.parameters()) <= _GRADIENTS
    found = torch.zeros(len(table.target), dtype=torch.float64, device=device)
    norms = find_norms(model) if device.type == "cpu" else []
    with torch.set_grad_enabled(with_gradient), evaluation_mode(model.train()), use_fast_norms(norms):
        for micro in build_micro_batches(experiences, table, range(len(experiences)), _BUDGET, device):
            with use_packed_attention(model, micro):
                logprob, _ = compute_logprobs(model, micro, table)
                found[micro.tokens] = logprob.detach().double()
                if with_gradient:
                    (logprob * weights[micro.tokens]).sum().backward()
    norm = _gradient_norms(model)
    at, worst = 0, 0.0
    for group, pictures in zip(completions, seen, strict=True):
        with torch.set_grad_enabled(with_gradient):
            own = hf_completion_logprobs(model, group, pictures)
            part = slice(at, at + len(own))
            if with_gradient:  # subtracted where the trainer's is, since a second gradient takes as much as the model
                (-own * weights[part]).sum().backward()
        gap = float((own.detach().double() - found[part]).abs().max())
        worst = gap if not gap <= worst else worst
        at += len(own)
    gaps = [LogprobGap("trainer: log-probs", worst, logprob_tolerance(model))]
    if not gaps[0].right:
        gaps = [replace(gaps[0], layer=_layer(model, experiences))]
    if with_gradient:
        gaps.append(_gradient_gap(norm, _gradient_norms(model)))
    for parameter in model.parameters():
        parameter.grad = None
    if device.type == "cuda" and next(model.parameters()).dtype == torch.float32:
        gaps.append(_bf16_gap(model, experiences, found))
    return gaps


def _bf16_gap(model: Any, experiences: list[Experience], exact: Tensor) -> LogprobGap:
    """Compares the trainer's log-probs in bf16, for which a GPU has kernels of its own, with those in fp32."""
    device, found = exact.device, torch.zeros_like(exact)
    table = build_token_table(experiences, device)
    with torch.no_grad(), evaluation_mode(model.train()):
        for micro in build_micro_batches(experiences, table, range(len(experiences)), _BUDGET, device):
            with use_packed_attention(model, micro):
                found[micro.tokens] = compute_logprobs(model, micro, table, bf16=True)[0].double()
    return LogprobGap("trainer: log-probs in bf16", float((found - exact).abs().mean()), _BF16_TOLERANCE)


def _gradient_gap(norms: dict[str, float], apart: dict[str, float]) -> LogprobGap:
    """Relative gap over all parameters; names the parameter that contributes most.

    Args:
        norms: of the gradient by parameter.
        apart: norms of its difference to the model's own.
    """
    norm, total = (sum(value**2 for value in each.values()) ** 0.5 for each in (norms, apart))
    gap = LogprobGap("trainer: gradient", total / norm if norm else total, _GRADIENT_TOLERANCE)
    return gap if gap.right else replace(gap, layer=max(apart, key=lambda name: apart[name]))


def _gradient_norms(model: Any) -> dict[str, float]:
    """Norm of each parameter's gradient, summed in float64 part by part."""

    def norm(gradient: Tensor) -> float:
        return math.sqrt(sum(float(part.double().square().sum()) for part in gradient.flatten().split(_PART)))

    return {name: norm(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _layer(model: Any, experiences: list[Experience]) -> str:
    """Names the layer where the trainer's forward pass first differs from the model's, on a single sequence."""
    one, device = [experiences[0]], next(model.parameters()).device
    micro = build_micro_batches(one, build_token_table(one, device), [0], _BUDGET, device)[0]
    with (
        torch.no_grad(),
        evaluation_mode(model.train()),
        use_packed_attention(model, micro),
        record_layer_outputs(model) as outputs,
    ):
        compute_hidden_states(model, micro)
    return find_first_difference(
        model, hf_layer_outputs(model, micro.input_ids[0].tolist()), [torch.cat(each) for each in outputs]
    )


def _experience(completion: Completion, group: int, pictures: PicturePrompt | None) -> Experience:
    prompt, own = completion.prompt_ids, completion.token_ids
    return Experience(
        id=f"{group}-{completion.index}",
        task_id=str(group),
        group=str(group),
        token_ids=np.concatenate([prompt, own]),
        action_mask=np.arange(len(prompt) + len(own)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(len(prompt), -1, np.int32), completion.versions]),
        pictures=pictures,
    )


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Converts weights in bf16 to float32 and back, which is lossless: errors of bf16 would hide all others."""
    narrow = [(each, each.data) for each in model.parameters() if each.dtype == torch.bfloat16]
    for each, own in narrow:
        each.data = own.float()
    try:
        yield
    finally:
        for each, own in narrow:
            each.data = own


@contextmanager
def _in_float64(model: Any) -> Iterator[None]:
    """Converts the weights to float64 and back, which is lossless."""
    model.double()
    try:
        yield
    finally:
        model.float()
        ensure_own_memory(model.parameters())


def _digest(model: Any, folder: Path) -> str:
    """Hash of the configuration, names and shapes of the weights, library versions and the code that computes the
    model, including the folder's own.
    """
    found = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    if (device := next(model.parameters()).device).type == "cuda":
        found.update(torch.cuda.get_device_name(device).encode())
    config = folder / "config.json"
    found.update(config.read_bytes() if config.is_file() else model.config.to_json_string().encode())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    root = Path(rollmill.__file__).parent
    for part in (root / "models", root / "engines/native", root / "trainer"):
        for file in sorted(part.glob("*.py")):
            found.update(file.read_bytes())
    for file in sorted(folder.glob("*.py")):  # the model's own code, which `trust_remote_code` runs
        found.update(f"{file.name}\n".encode() + file.read_bytes())
    return found.hexdigest()
