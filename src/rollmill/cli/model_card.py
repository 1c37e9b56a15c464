"""The model card of an export: README.md for the Hugging Face hub, made from the files of a run.

Texts of the run (names, paths, settings) are escaped. Folders of this machine are named by their last parts only.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import rollmill
from rollmill.config.hub import fetch, parse_reference
from rollmill.config.yaml_file import write_yaml
from rollmill.trackers.eval_metrics import EVAL_PREFIX, eval_sets_in, first_accuracy
from rollmill.trackers.metrics_log import is_finite_number, read_metrics

CARD = "README.md"
_CURVE_ROWS = 10
_CACHED = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]{7,64})")
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\r?\n---\s", re.DOTALL)
_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}")
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_MOST_LICENCE_BYTES = 1 << 20
_SETTINGS = (
    *("algorithm.advantage.name", "algorithm.loss.name", "algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    *("algorithm.beta", "algorithm.kl.coefficient", "algorithm.entropy", "algorithm.aggregation", "algorithm.batch"),
    *("rollout.batch", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "max_staleness"),
    *("trainer.lr", "trainer.schedule", "trainer.warmup_steps", "trainer.weight_decay", "trainer.max_grad_norm"),
    *("trainer.updates_per_batch", "trainer.epochs_per_batch", "trainer.precision", "trainer.ranks"),
)
"""Keys of a stage that the card shows, where the algorithm has them."""


@dataclass(frozen=True, slots=True)
class StartingModel:
    """The model that a run started from."""

    name: str  #: for people
    folder: Path | None = None  #: None: a new model
    hub_id: str | None = None  #: where the folder is in the hub's cache
    revision: str | None = None
    licence: str | None = None  #: id in the card of the folder
    licence_files: tuple[Path, ...] = ()


def find_starting_model(settings: Mapping[str, Any]) -> StartingModel:
    """Describe the model of a resolved run file, with what its folder says about its origin and licence.

    Raises ConfigError if it is of the hub and no longer in the cache.
    """
    model = settings.get("model") or {}
    path = str(model.get("path", "new"))
    if path == "new":
        new = model.get("new") or {}
        return StartingModel(f"A new {new.get('architecture', 'qwen3')} model with random weights")
    reference = parse_reference(path) if path.startswith("hf:") else None
    folder = Path(path) if reference is None else fetch(reference, "model")
    cached = _CACHED.search(folder.resolve().as_posix()) or _CACHED.search(folder.as_posix())
    hub_id, revision = (f"{cached[1]}/{cached[2]}", cached[3]) if cached else (None, None)
    found = sorted({file for pattern in _LICENCES for file in folder.glob(pattern)})
    files = tuple(file for file in found if file.is_file() and file.stat().st_size <= _MOST_LICENCE_BYTES)
    return StartingModel(hub_id or folder.name, folder, hub_id, revision, _licence(folder / CARD), files)


def render_model_card(
    run: Path, settings: Mapping[str, Any], step: int, base: StartingModel, folder: Path, *, dtype: str, name: str
) -> str:
    """Return the card of an exported checkpoint.

    Args:
        settings: the resolved run file.
        folder: the export, for its kind of model.
        name: what the usage example loads.

    Raises ConfigError if `run` is no run directory, RollmillError if its metrics are damaged.
    """
    rows = [row for row in read_metrics(run) if row.get("step", 0) <= step]
    stages = _stages(settings, rows)
    algorithms = list(dict.fromkeys(str((stage.get("algorithm") or {}).get("name", "")) for stage in stages))
    parts = [
        _front_matter(base, folder, algorithms),
        f"# {_escaped(Path(name).name)}",
        _introduction(base, settings, step, dtype, algorithms),
        _usage(folder, name, base),
        *(_recipe(stage, settings) for stage in stages),
        _curve(rows),
        _evaluation(stages, rows),
        _licence_text(base),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base: StartingModel, folder: Path, algorithms: Sequence[str]) -> str:
    adapter, _, tag = _kind(folder)
    data: dict[str, Any] = {}
    if base.licence is not None:
        data["license"] = base.licence
    elif base.licence_files:
        data |= {"license": "other", "license_name": "of-the-base-model", "license_link": base.licence_files[0].name}
    if base.hub_id is not None:
        data |= {"base_model": base.hub_id, "base_model_relation": "adapter" if adapter else "finetune"}
    data |= {"library_name": "peft" if adapter else "transformers", "pipeline_tag": tag}
    data["tags"] = ["rollmill", "reinforcement-learning", *filter(None, algorithms)]
    return f"---\n{write_yaml(data)}---"


def _introduction(
    base: StartingModel, settings: Mapping[str, Any], step: int, dtype: str, algorithms: Sequence[str]
) -> str:
    revision = f" (revision `{base.revision}`)" if base.revision else ""
    how = _escaped(" then ".join(filter(None, algorithms))) or "training"
    lora = (settings.get("model") or {}).get("lora")
    with_lora = f" with LoRA (rank {lora.get('rank')}, alpha {lora.get('alpha')})" if lora else ""
    return (
        f"{_escaped(base.name)}{revision} after {step:,} steps of {how}{with_lora}, "
        f"in the run {_escaped(settings.get('name') or 'without a name')}. Weights are in {dtype}. "
        f"Trained and exported with rollmill {_escaped(rollmill.__version__)}; this card is made from the run's files."
    )


def _kind(folder: Path) -> tuple[bool, str, str]:
    """True for adapters; the class that loads the model; the hub's name of the task."""
    if (folder / "adapter_config.json").is_file():
        return True, "AutoModelForCausalLM", "text-generation"
    if "SequenceClassification" in (folder / "config.json").read_text(encoding="utf-8"):
        return False, "AutoModelForSequenceClassification", "text-classification"
    if any((folder / each).is_file() for each in ("processor_config.json", "preprocessor_config.json")):
        return False, "AutoModelForImageTextToText", "image-text-to-text"
    return False, "AutoModelForCausalLM", "text-generation"


def _usage(folder: Path, name: str, base: StartingModel) -> str:
    adapter, loader, _ = _kind(folder)
    second = "AutoProcessor" if loader == "AutoModelForImageTextToText" else "AutoTokenizer"
    place = re.sub(r"[^\w./ -]", "_", name)  # no quote or fence ends the block
    lines = [f"from transformers import {loader}, {second}", ""]
    if adapter:
        origin = re.sub(r"[^\w./ -]", "_", base.name)
        lines[:1] = ["from peft import PeftModel", lines[0]]
        lines.append(f'model = PeftModel.from_pretrained({loader}.from_pretrained("{origin}"), "{place}")')
    else:
        lines.append(f'model = {loader}.from_pretrained("{place}")')
    lines.append(f'{second.removeprefix("Auto").lower()} = {second}.from_pretrained("{place}")')
    return "\n".join(["```python", *lines, "```"])


def _stages(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stages of the run up to the exported step."""
    stages = [dict(stage) for stage in settings.get("stages") or [settings]]
    begun = {row.get("stage") for row in rows if row.get("stage")}
    return [stage for stage in stages if stage.get("name") in begun] or stages


def _recipe(stage: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Section about a stage: data, rewards and key settings."""
    algorithm = str((stage.get("algorithm") or {}).get("name", ""))
    several = len(settings.get("stages") or ()) > 1
    title = f"## Stage {_escaped(stage.get('name'))}: {_escaped(algorithm)}" if several else "## Training"
    table = [("algorithm", algorithm), ("steps", stage.get("steps"))]
    domains: dict[str, Mapping[str, Any]] = {
        name: {**stage, **each} for name, each in (stage.get("domains") or {}).items()
    } or {"": stage}
    for name, domain in domains.items():
        suffix = f" of {name}" if name else ""
        table.append((f"data{suffix}", "; ".join(_tasksets(domain.get("taskset")))))
        table.append((f"rewards{suffix}", ", ".join(_rewards(domain.get("rewards")))))
        table.append((f"workflow{suffix}", _at(domain, "workflow.name")))
    table += [(key, _at(stage, key)) for key in _SETTINGS]
    return f"{title}\n\n" + _table(("setting", "value"), [row for row in table if row[1] not in (None, "")])


def _tasksets(taskset: Any) -> Iterator[str]:
    """Descriptions of a taskset or of the entries of its mix."""
    if not isinstance(taskset, Mapping):
        return
    for entry in taskset.get("mix") or [taskset]:
        entry = entry if isinstance(entry, Mapping) else {}
        source = next((entry[key] for key in ("path", "function", "generator") if entry.get(key)), None)
        if source is not None:
            details = [f"{key} {entry[key]}" for key in ("split", "preset", "limit") if entry.get(key)]
            yield _shortened(source) + (f" ({', '.join(details)})" if details else "")


def _rewards(rewards: Any) -> Iterator[str]:
    for each in rewards or ():
        weight = each.get("weight", 1.0)
        yield _shortened(each.get("name", "")) + (f" x {weight:g}" if weight != 1.0 else "")


def _shortened(source: Any) -> str:
    """A path of this machine by its last two parts; any other text unchanged."""
    text = str(source.get("name", source)) if isinstance(source, Mapping) else str(source)
    return "/".join(Path(text).parts[-2:]).lstrip("/") if Path(text).is_absolute() else text


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return None if isinstance(values, Mapping | list) else values


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of at most `_CURVE_ROWS` spans of steps: mean reward, or loss, and the last accuracy in each."""
    steps = [row for row in rows if row.get("step", 0) > 0]
    measure = "reward/mean" if any(is_finite_number(row.get("reward/mean")) for row in steps) else "loss"
    size = max(1, -(-len(steps) // _CURVE_ROWS))
    spans = [[row for row in rows if row.get("step") == 0], *(steps[i : i + size] for i in range(0, len(steps), size))]
    table = []
    for span in filter(None, spans):
        values = [float(row[measure]) for row in span if is_finite_number(row.get(measure))]
        exact = [value for row in span if (value := first_accuracy(row, ("greedy", "sampled"))) is not None]
        first, last = span[0]["step"], span[-1]["step"]
        mean = sum(values) / len(values) if values else None
        table.append((first if first == last else f"{first} to {last}", mean, exact[-1] if exact else None))
    if not any(cell is not None for row in table for cell in row[1:]):
        return ""
    name = "mean reward" if measure == "reward/mean" else "mean loss"
    return "## Curve\n\n" + _table(("steps", name, "held-out accuracy at the end"), table)


def _evaluation(stages: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of each evaluation measure, first and last; the last stage's only, if stages are evaluated differently."""
    if len({write_yaml({"evaluation": stage.get("evaluation")}) for stage in stages}) > 1:
        rows = [row for row in rows if row.get("stage") == stages[-1].get("name")]
    table = []
    for name, measures in eval_sets_in(rows).items():
        for measure in measures:
            key = f"{EVAL_PREFIX}{name}/{measure}" if name else f"{EVAL_PREFIX}{measure}"
            found = [row for row in rows if is_finite_number(row.get(key))]
            if found:
                before = _measured(found[0], key) if len(found) > 1 else None
                table.append((name or "held-out", measure, before, _measured(found[-1], key)))
    if not table:
        return ""
    note = "95 % intervals in brackets. `reward` and `length` are means; the others are shares of tasks."
    return f"## Evaluation\n\n{_table(('tasks', 'measure', 'before', 'after'), table)}\n\n{note}"


def _measured(row: Mapping[str, Any], key: str) -> str:
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    interval = f" ({low:.3g} to {high:.3g})" if is_finite_number(low) and is_finite_number(high) else ""
    return f"{row[key]:.3g}{interval}, step {row['step']}"


def _licence_text(base: StartingModel) -> str:
    if base.folder is None:
        return ""
    names = ", ".join(_escaped(path.name) for path in base.licence_files)
    if base.licence is None and not names:
        return "## Licence\n\nThe folder of the base model states no licence."
    stated = "" if base.licence is None else f"The licence of the base model is `{base.licence}`. "
    return f"## Licence\n\n{stated}" + (f"Files of the base model: {names}." if names else "").strip()


def _licence(card: Path) -> str | None:
    """The licence that the front matter of a model card names."""
    try:
        with card.open("rb") as file:
            found = _FRONT_MATTER.match(file.read(_MOST_LICENCE_BYTES).decode("utf-8", "replace"))
        data = yaml.safe_load(found[1]) if found else None
    except (OSError, yaml.YAMLError, RecursionError):
        return None
    licence = data.get("license") if isinstance(data, dict) else None
    return licence if isinstance(licence, str) and _LICENCE_ID.fullmatch(licence) else None


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else _escaped(value)


def _escaped(value: Any) -> str:
    """Text on one line, of which Markdown and HTML interpret nothing."""
    text = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", text)
