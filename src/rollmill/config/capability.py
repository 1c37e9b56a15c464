"""Design rule 7: every key counts. Which keys does a stage's choice of components not honour, and who would?"""

from __future__ import annotations

from rollmill.config.advantage import GroupNormalised, MirrorBaseline
from rollmill.config.algorithm import AlgorithmOptions, PolicyGradientOptions
from rollmill.config.contradictions import buffer_contradictions, contradictions, model_contradictions
from rollmill.config.engine_checks import unhonoured_by_engine
from rollmill.config.evaluation_checks import best_contradictions, place_of, unhonoured_in_sets
from rollmill.config.mode_checks import mode_contradictions, unhonoured_by_mode
from rollmill.config.operator_contradictions import pipeline_contradictions
from rollmill.config.order import CurriculumOrder, EasyToHardOrder, TrackedOrder
from rollmill.config.placement_checks import placement_contradictions, unhonoured_by_placement
from rollmill.config.residency_checks import residency_contradictions, unhonoured_by_residency
from rollmill.config.resolve import STAGE_KEYS, Resolved
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.taskset import MixEntry, TasksetConfig, TasksetSection
from rollmill.config.tree import KeyPath, Node, Problem, dotted, find, leaves, locate
from rollmill.config.workflow_checks import unhonoured_by_workflow
from rollmill.config.workflows import Traffic
from rollmill.recipes import DPO, Distillation, SelfDistill

_TRUNCATION = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (
    "max_new_tokens",
    "max_sequences",
    "prefill_tokens",
    "stop",
    "stop_token_ids",
    "deadline_s",
    "repetition",
    "ngram_draft",
)


def check_capabilities(resolved: Resolved) -> list[Problem]:
    """Explicit keys that nothing honours, and choices that contradict each other."""
    found = _dead_base_keys(resolved) + _unhonoured_in_stages(resolved)
    for path, text in unhonoured_by_run(resolved.config, resolved.stages).items():
        if find(resolved.root, path):
            found.append(Problem(*locate(resolved.root, path), text))
    for path, text in model_contradictions(resolved.config.model, resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for path, text in residency_contradictions(resolved.config.model, resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for path, text in best_contradictions(resolved.config, resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for path, text in placement_contradictions(resolved.config, resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for path, text in mode_contradictions(resolved.config, resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for path, text in buffer_contradictions(resolved.stages):
        found.append(Problem(*locate(resolved.root, path), text))
    for stage, tree in zip(resolved.stages, resolved.trees, strict=True):
        wrong = (*contradictions(stage), *pipeline_contradictions(stage))
        found += [Problem(*locate(tree, path), text) for path, text in wrong]
    return found


def unhonoured(stage: StageConfig) -> dict[KeyPath, str]:
    """Keys that no component of this stage honours, each with who would."""
    keys: dict[KeyPath, str] = {}
    algorithm, evaluation = stage.algorithm, stage.evaluation if stage.algorithm.trains_policy else None
    learner = f"algorithm `{algorithm.name}` learns from {algorithm.examples} and rolls nothing out"
    if not algorithm.uses_rollouts:
        names = ("batch", "group_size", "reuse", "oversample", "token_budget", "partial")
        batch = [("rollout", name) for name in names]
        for key in (*batch, ("max_staleness",), ("pipeline",), ("buffer",), ("trainer", "router_replay")):
            keys[key] = f"not honoured: {learner}; {_instead(key)}"
        if evaluation is None:
            for name in (*_TRUNCATION, *_SAMPLING):
                keys["rollout", name] = f"not honoured: {learner}, and there is no evaluation; remove it"
            keys["rewards",] = f"not honoured: {learner}, and there is no evaluation to judge; remove them"
            keys["judging",] = f"not honoured: {learner}, and there is no evaluation to judge; remove it"
        elif all(each.samples == 0 for each in evaluation.all_sets().values()):
            for name in _TRUNCATION:
                keys["rollout", name] = (
                    f"not honoured: {learner}, and evaluation is greedy only (samples: 0); remove it"
                )
    if not algorithm.trains_policy:
        keys["evaluation",] = (
            f"not honoured by algorithm `{algorithm.name}`, which changes no policy; the metric `pairs/accuracy` is "
            "measured on each batch before it is learned from; remove it"
        )
        keys["trainer", "logprob_chunk"] = f"not honoured by algorithm `{algorithm.name}`, which needs no log-probs"
    keys |= _unhonoured_by_buffer(stage)
    keys |= unhonoured_by_workflow(stage)
    keys |= unhonoured_by_residency(stage)
    keys |= unhonoured_by_engine(stage)
    if not stage.needs_taskset and isinstance(stage.workflow, Traffic):
        keys["taskset",] = "not honoured by workflow `traffic`, whose prompts come from an application; remove it"
    elif not stage.needs_taskset:
        keys["taskset",] = f"not honoured: {learner}, and `taskset` is not among experts.sources; add it there"
    if evaluation is None:
        keys["early_stop",] = (
            "not honoured without `evaluation`, which measures its metric; add evaluation or remove it"
        )
    if stage.trainer.schedule == "constant":
        keys["trainer", "min_lr_ratio"] = "not honoured by schedule `constant`; it is by `linear` and `cosine`"
    if stage.trainer.ranks == 1:
        for name in ("sharding", "rank_deadline_s"):
            keys["trainer", name] = "not honoured with one rank; give trainer.ranks or remove it"
    if not algorithm.uses_rollouts:
        for path, section in _sections(stage.taskset, ("taskset",)):
            if section.order.uses_success:
                keys[(*path, "order")] = (
                    f"not honoured: {learner}, so no success is seen; use `shuffled`, or an order by difficulty"
                )
    if stage.evaluation is not None:
        keys |= unhonoured_in_sets(stage)
        for name, each in stage.evaluation.all_sets().items():
            keys |= unhonoured_in_evaluation(each.taskset, place_of(name))
    for path, section in _sections(stage.taskset, ("taskset",)):
        keys |= _unhonoured_in_order(section, path)
    return keys | unhonoured_parts(algorithm)


def _unhonoured_by_buffer(stage: StageConfig) -> dict[KeyPath, str]:
    """Keys of what lies between explorer and trainer."""
    keys: dict[KeyPath, str] = {}
    algorithm, buffer = stage.algorithm, stage.buffer
    if not algorithm.uses_examples:
        text = f"not honoured: algorithm `{algorithm.name}` imitates nothing; sft, mix, chord and dpo honour it"
        keys["experts",] = text
    elif algorithm.uses_pairs:
        text = f"not honoured: algorithm `{algorithm.name}` learns from pairs; kto and those that imitate honour it"
        keys["experts", "rated_at_least"] = text
    if buffer.store == "memory":
        keys["buffer", "url"] = "not honoured by store `memory`; it is by `sql`"
    replay = buffer.replay
    if replay is not None and replay.order != "priority":
        for name in ("priority", "exponent", "decay"):
            keys["buffer", "replay", name] = f"not honoured by order `{replay.order}`; it is by `priority`"
    return keys


def unhonoured_in_evaluation(taskset: TasksetConfig, at: KeyPath) -> dict[KeyPath, str]:
    """Order and weights of held-out tasks, which are all evaluated once."""
    keys: dict[KeyPath, str] = {}
    for path, section in _sections(taskset, (*at, "taskset")):
        keys[(*path, "order")] = "not honoured: every held-out task is evaluated each time; remove it"
        if isinstance(section, MixEntry):
            keys[(*path, "weight")] = "not honoured: every held-out task is evaluated each time; it is in `taskset.mix`"
    return keys


def _sections(taskset: TasksetConfig | None, at: KeyPath) -> list[tuple[KeyPath, TasksetSection]]:
    """The sections of a taskset that say in which order tasks come, each with its place."""
    if taskset is None:
        return []
    entries = [((*at, "mix", index), entry) for index, entry in enumerate(taskset.mix)]
    return [*entries] or [(at, taskset)]


def _unhonoured_in_order(section: TasksetSection, at: KeyPath) -> dict[KeyPath, str]:
    order = section.order
    if not isinstance(order, EasyToHardOrder | CurriculumOrder):
        return {}
    if order.by == "success":
        return {(*at, "order", "column"): "not honoured with by `success`; it is with `difficulty`"}
    tracking = TrackedOrder.model_fields.keys() - {"name", "skip_uniform"}
    return {(*at, "order", key): "not honoured with by `difficulty`; it is with `success`" for key in tracking}


def unhonoured_parts(algorithm: AlgorithmOptions) -> dict[KeyPath, str]:
    """Keys of the section `algorithm` that its choice of parts does not honour, each with who would."""
    keys: dict[KeyPath, str] = {}
    if isinstance(algorithm, DPO) and algorithm.loss == "ipo":
        keys["algorithm", "label_smoothing"] = "not honoured by loss `ipo`; it is by `sigmoid`"
    if isinstance(algorithm, Distillation):
        kind = algorithm.divergence
        if kind not in ("jsd", "sampled_jsd"):
            keys["algorithm", "beta"] = f"not honoured by divergence `{kind}`; it is by `jsd` and `sampled_jsd`"
        if kind in ("sampled", "sampled_jsd"):
            keys["algorithm", "temperature"] = f"not honoured by divergence `{kind}`; it is by the others"
    if isinstance(algorithm, SelfDistill):
        if algorithm.weights != "ema":
            keys["algorithm", "rate"] = f"not honoured with weights `{algorithm.weights}`; it is with `ema`"
        if algorithm.context != "success":
            text = f"not honoured with context `{algorithm.context}`; it is with `success`"
            keys["algorithm", "success_at_least"] = text
    if not isinstance(algorithm, PolicyGradientOptions):
        return keys
    advantage, kl = algorithm.advantage, algorithm.kl
    if isinstance(advantage, GroupNormalised) and advantage.scale == "none":
        keys["algorithm", "advantage", "ddof"] = "not honoured with scale `none`; it is with `group` and `batch`"
    if isinstance(advantage, MirrorBaseline) and advantage.baseline == "mean":
        keys["algorithm", "advantage", "tau"] = "not honoured with baseline `mean`; it is with `logavgexp`"
    if not advantage.uses_critic:
        keys["algorithm", "critic"] = f"advantage `{advantage.name}` needs no critic; `gae` (algorithm ppo) does"
    else:
        keys["algorithm", "overlong_buffer"] = "not honoured by advantage `gae`; it is by those of whole completions"
        keys["algorithm", "drop_uniform_groups"] = "not honoured by advantage `gae`, which compares no groups"
    ratio = algorithm.loss.uses_old or algorithm.corrections or any(mask.uses_old for mask in algorithm.masks)
    if not ratio:
        keys["algorithm", "proximal"] = f"loss `{algorithm.loss.name}` looks at no old log-probs; remove it"
    if advantage.uses_greedy:
        keys["algorithm", "overlong_buffer"] = "not honoured by `remax`, whose greedy baseline it would not reach"
    if kl.coefficient == 0:
        for key in ("estimator", "where", "target", "horizon", "refresh_every"):
            keys["algorithm", "kl", key] = "not honoured with coefficient 0; give kl.coefficient or remove it"
    elif kl.target is None:
        keys["algorithm", "kl", "horizon"] = "not honoured without kl.target; give a target or remove it"
    return keys


def _instead(key: KeyPath) -> str:
    if key == ("rollout", "batch"):
        return "demonstrations per step are `algorithm.batch`"
    return "algorithms that roll out honour it, such as grpo"


def unhonoured_by_run(config: RunConfig, stages: list[StageConfig]) -> dict[KeyPath, str]:
    """Run-wide keys that nothing honours."""
    keys: dict[KeyPath, str] = {}
    if all(stage.evaluation is None for stage in stages):
        keys["checkpoint", "keep_best"] = (
            "not honoured without `evaluation`, which finds the best; add it or remove this"
        )
    new = config.model.new
    if new is not None and new.tokenizer.kind == "char":
        text = "not honoured by kind `char`, whose vocabulary is the characters seen; it is by `bpe`"
        keys["model", "new", "tokenizer", "vocab_size"] = text
    if config.model.path == "new":
        keys["model", "trust_remote_code"] = "not honoured by a new model; it is when model.path is a checkpoint folder"
        keys["model", "lora"] = "adapters need trained weights; it is honoured when model.path is a checkpoint folder"
    return keys | unhonoured_by_placement(config, stages) | unhonoured_by_mode(config)


def _unhonoured_in_stages(resolved: Resolved) -> list[Problem]:
    """A key is a problem when no stage that has it honours it; a key of the whole file may serve only some stages."""
    marked = [_marked_leaves(stage, tree) for stage, tree in zip(resolved.stages, resolved.trees, strict=True)]
    honoured = {
        id(leaf)
        for tree, marks in zip(resolved.trees, marked, strict=True)
        for leaf in leaves(tree)
        if id(leaf) not in marks
    }
    found: dict[tuple[str, str], Problem] = {}
    for stage, tree in zip(resolved.stages, resolved.trees, strict=True):
        for path, text in unhonoured(stage).items():
            node = find(tree, path)
            if node is not None and not any(id(leaf) in honoured for leaf in leaves(node)):
                place, key = locate(tree, path)
                found.setdefault((place, key), Problem(place, key, text))
    return list(found.values())


def _marked_leaves(stage: StageConfig, tree: Node) -> set[int]:
    nodes = [find(tree, path) for path in unhonoured(stage)]
    return {id(leaf) for node in nodes if node is not None for leaf in leaves(node)}


def _dead_base_keys(resolved: Resolved) -> list[Problem]:
    """Keys of the whole file that every stage replaces. Included files may offer defaults that nobody takes."""
    alive = {id(leaf) for tree in resolved.trees for leaf in leaves(tree)}
    found = []
    for key, section in resolved.root.value.items():
        if key not in STAGE_KEYS:
            continue
        dead = [leaf for leaf in leaves(section) if id(leaf) not in alive and not leaf.origin.included]
        if dead and len(dead) == len(list(leaves(section))):
            dead = [section]
        for node in dead:
            text = f"every stage sets its own, so this is never used; remove it or change stages.0.{dotted(node.path)}"
            found.append(Problem(node.origin.place, dotted(node.path), text))
    return found
