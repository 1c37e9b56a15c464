"""Checks of `domains`: every section is checked as each domain sees it, and what domains cannot have of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.checks.evaluation import evaluation_conflicts
from rollmill.config.domains import OVERRIDES
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import LiveRequestsWorkflow

_SHARED_OPTIONS = ("masks", "corrections", "proximal", "entropy_control", "reset_optimizer")
"""Options of an algorithm that hold for a whole optimizer step, so that all domains have the same."""
_ROUNDING = 1e-6


def domain_path(stage: StageConfig, name: str, path: KeyPath) -> KeyPath:
    """Returns where a run file says what a domain sees at a key path: in the domain, or in the stage."""
    domain = stage.domains[name]
    if path[:3] == ("evaluation", "sets", name) and domain.evaluation is not None:
        return ("domains", name, "evaluation", *path[3:])
    of_domain = path[0] == "taskset" or (path[0] in OVERRIDES and getattr(domain, str(path[0])) is not None)
    if path[0] == "algorithm" and not stage.algorithm.uses_rollouts:
        of_domain = False
    if path[0] == "rollout" and len(path) > 1:
        of_domain = getattr(domain.rollout, str(path[1]), None) is not None
    return ("domains", name, *path) if of_domain else path


def unused_domain_keys(
    stage: StageConfig, unused_keys: Callable[[StageConfig], dict[KeyPath, str]]
) -> dict[KeyPath, str]:
    """Returns keys without effect in a stage with domains, each with the reason.

    A key of the stage is unused if no domain that takes it from there uses it.

    Args:
        unused_keys: finds those of a stage without domains.
    """
    keys: dict[KeyPath, str] = {}
    by_domain = {name: unused_keys(view) for name, view in stage.by_domain().items()}
    shared: dict[KeyPath, dict[str, str]] = {}
    for name, found in by_domain.items():
        for path, text in found.items():
            at = domain_path(stage, name, path)
            if at == path:
                shared.setdefault(path, {})[name] = text
            else:
                keys[at] = text
    for path, texts in shared.items():
        users = [name for name in stage.domains if domain_path(stage, name, path) == path]
        if len(texts) == len(users) and not (path[0] == "early_stop" and stage.evaluation is not None):
            keys[path] = next(iter(texts.values()))
    if not stage.algorithm.uses_rollouts:
        text = f"not honoured: algorithm `{stage.algorithm.name}` of the stage learns from {stage.algorithm.examples}"
        keys |= {("domains", name, "algorithm"): text for name in stage.domains}
    if stage.buffer.replay is None or not stage.algorithm.uses_rollouts:
        text = "not honoured without replay; add buffer.replay, or remove this"
        keys |= {("domains", name, "replay_share"): text for name in stage.domains}
    for key in OVERRIDES:
        if all(getattr(each, key) is not None for each in stage.domains.values()) and key != "algorithm":
            keys[key,] = "every domain has its own, so this is never used; remove it"
    return keys


def domain_conflicts(
    stage: StageConfig, conflicts: Callable[[StageConfig], Iterator[tuple[KeyPath, str]]]
) -> Iterator[tuple[KeyPath, str]]:
    """Yields conflicting choices of a stage with domains, each once.

    Args:
        conflicts: finds those of a stage without domains.
    """
    found: dict[tuple[KeyPath, str], None] = {}
    for name, view in stage.by_domain().items():
        for path, text in (*conflicts(view), *_own(stage, name, view)):
            if path[0] == "early_stop" and stage.evaluation is not None:
                continue  # it may watch another domain's evaluation: checked for the whole stage below
            found.setdefault((domain_path(stage, name, path), text))
    for path, text in evaluation_conflicts(stage):
        name = str(path[2]) if len(path) > 2 and path[2] in stage.domains else next(iter(stage.domains))
        found.setdefault((domain_path(stage, name, path) if path[:1] == ("evaluation",) else path, text))
    yield from found
    yield from _models(stage)
    yield from _replay_shares(stage)


def _own(stage: StageConfig, name: str, view: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(view.workflow, LiveRequestsWorkflow):
        yield (
            ("workflow",),
            "workflow `live_requests` has no tasks, and domains are kinds of tasks; use a run of its own",
        )
    if stage.domains[name].algorithm is not None and stage.algorithm.uses_rollouts:
        yield from _algorithm(stage, view)


def _algorithm(stage: StageConfig, view: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    """Checks a domain's own algorithm: it shares the policy, the reference and the optimizer step with the others."""
    own, shared, at = view.algorithm, stage.algorithm, ("algorithm",)
    if not isinstance(own, PolicyGradientOptions) or not isinstance(shared, PolicyGradientOptions):
        wrong = own if not isinstance(own, PolicyGradientOptions) else shared
        yield at, f"algorithm `{wrong.name}` cannot be that of one domain; use policy-gradient algorithms, such as grpo"
        return
    if own.uses_examples != shared.uses_examples:
        yield at, f"`{own.name}` and `{shared.name}` do not both learn from demonstrations; use the same in all domains"
    for algorithm in (own, shared):
        if algorithm.advantage.uses_critic:
            yield at, f"`{algorithm.name}` trains a critic on all experiences; use the same algorithm in all domains"
        if algorithm.loss.selection:
            yield at, f"loss `{algorithm.loss.name}` chooses among all tokens of a step; use it in all domains"
    for key in _SHARED_OPTIONS:
        if getattr(own, key) != getattr(shared, key):
            yield (*at, key), f"holds for whole optimizer steps, so it must be as in the stage's algorithm.{key}"
    for key in ("where", "target", "refresh_every"):
        if own.kl.coefficient and shared.kl.coefficient and getattr(own.kl, key) != getattr(shared.kl, key):
            yield (*at, "kl", key), f"there is one reference policy, so it must be as in the stage's algorithm.kl.{key}"
    if own.kl.target is not None and own.kl.coefficient != shared.kl.coefficient:
        text = "adapts to the KL of all domains; give the same in all, or remove kl.target"
        yield (*at, "kl", "coefficient"), text
    in_reward = [each for each in (own, shared) if each.kl.coefficient and each.kl.where == "reward"]
    if len(in_reward) == 1 or (in_reward and own.kl != shared.kl):
        yield (*at, "kl"), "a penalty in the reward must be the same in all domains; use where: loss"


def _models(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    known = dict(stage.models)
    for name, domain in stage.domains.items():
        for model, section in (domain.models or {}).items():
            if known.setdefault(model, section) != section:
                text = f"another model is called `{model}`, in the stage or in another domain; rename one of them"
                yield ("domains", name, "models", model), text


def _replay_shares(stage: StageConfig) -> Iterator[tuple[KeyPath, str]]:
    shares = {name: each.replay_share for name, each in stage.domains.items() if each.replay_share is not None}
    total = sum(shares.values())
    if total > 1 + _ROUNDING:
        wrong = "which is more than all replayed groups"
    elif len(shares) == len(stage.domains) and total < 1 - _ROUNDING:
        wrong = "and no other domain takes the rest"
    else:
        return
    text = f"the shares of {', '.join(shares)} add up to {total:g}, {wrong}; correct them, or leave one out"
    yield ("domains", list(shares)[-1], "replay_share"), text


def unused_mixing(stage: StageConfig) -> Mapping[KeyPath, str]:
    """Returns `mixing` if there is nothing to mix."""
    if stage.domains:
        return {}
    return {("mixing",): "not honoured without domains; the weights of a mix are in taskset.mix"}
