"""`rollmill export RUN`: write a checkpoint of a run as a model folder for other programs, with a model card."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.errors import CheckpointError, ConfigError, ModelError, RollmillError

if TYPE_CHECKING:
    import torch

    from rollmill.cli.model_card import StartingModel

DTYPES = ("auto", "bf16", "fp32", "fp16")
_NAMES = {
    **{"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},  # in config.json
    **{"F32": "fp32", "BF16": "bf16", "F16": "fp16"},  # in safetensors
}
_TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[str, typer.Option(help="Checkpoint: `last`, `best` (by evaluation), or a step.")] = "last",
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder (default: RUN/exports/step-N-DTYPE).")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="`bf16`, `fp32`, `fp16`, or `auto`: that of the base model.")
    ] = "auto",
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA adapters alone, in peft's format.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ID", help="Then upload it to this repository of the hub.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, with a model card made from the run."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {', '.join(DTYPES)}, not {dtype!r}")
    from rollmill.cli.model_card import find_starting_model
    from rollmill.config.yaml_file import read_plain_yaml
    from rollmill.orchestrator.eval_targets import CheckpointTarget, find_eval_targets
    from rollmill.trackers.rollout_log import check_run_dir

    [target, *others] = find_eval_targets([check_run_dir(run)], step)
    if others or not isinstance(target, CheckpointTarget) or target.step is None:
        raise ConfigError(f"--step {step}: one checkpoint of a run is exported; give last, best or a number")
    settings = read_plain_yaml(run / "config.yaml")
    base = find_starting_model(settings)
    if adapter_only:
        _require_adapter(target.folder, base, pushed=push is not None)
    chosen = _base_dtype(base) if dtype == "auto" else dtype
    form = f"adapter-{chosen}" if adapter_only else chosen
    folder = run / "exports" / f"step-{target.step:06d}-{form}" if out is None else out
    if push is not None:
        _require_hub(push)
    summary = _write(run, settings, target.folder, target.step, folder, chosen, base, adapter_only, push)
    if push is not None:
        summary["url"] = _upload(folder, push)
    if as_json:
        print(json.dumps(summary))
        return
    what = "the adapters" if adapter_only else "the model"
    print(f"wrote {folder}: {what} of step {target.step}, {summary['parameters'] / 1e6:.2f}M parameters in {chosen}")
    if push is not None:
        print(f"uploaded to {summary['url']}")


def _require_adapter(folder: Path, base: StartingModel, *, pushed: bool) -> None:
    from rollmill.models.classifier import REWARD_MODEL_FOLDER
    from rollmill.models.lora import ADAPTER_FOLDER

    if not (folder / ADAPTER_FOLDER).is_dir():
        raise ConfigError(f"--adapter-only: {folder} has no adapters: its run trained all weights, without model.lora")
    if (folder / REWARD_MODEL_FOLDER).is_dir():
        raise ConfigError("--adapter-only: adapters alone would lack the reward model's head; export the whole model")
    if pushed and base.hub_id is None:
        raise ConfigError(
            f"--adapter-only --push: the base model {base.name} is a folder of this machine, so nobody else could use "
            "the adapters; push the merged model, without --adapter-only"
        )


def _base_dtype(base: StartingModel) -> str:
    """Return the type of a base model's weights, as config.json or else its first tensor says.

    fp32 for a new model, bf16 for a GGUF file.

    Raises ConfigError if the folder is gone, or it has another type.
    """
    from rollmill.models.gguf import find_gguf

    if base.folder is None:
        return "fp32"
    if find_gguf(base.folder) is not None:
        return "bf16"  # its weights are usually of 2 to 8 bits, which nothing is trained in
    advice = "give --dtype bf16, fp32 or fp16"
    try:
        config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
        parts = [config, *(each for each in config.values() if isinstance(each, dict))]
        named = [part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
        found = str(named[0]).removeprefix("torch.") if named else _first_dtype(base.folder)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--dtype auto: the base model {base.folder} cannot be read ({error}); {advice}") from error
    if found not in _NAMES:
        raise ConfigError(f"--dtype auto: the base model {base.folder} is in {found}; {advice}")
    return _NAMES[found]


def _first_dtype(folder: Path) -> str:
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    return str(file.get_slice(name).get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{path.name}: {error}") from error
    raise ValueError("it has no safetensors, and config.json names no dtype")


def _write(
    run: Path,
    settings: dict[str, Any],
    checkpoint: Path,
    step: int,
    out: Path,
    dtype: str,
    base: StartingModel,
    adapter_only: bool,
    push: str | None,
) -> dict[str, Any]:
    """Write the folder, and return the summary.

    Raises DamagedCheckpointError; ModelError if weights do not fit the type; CheckpointError if it cannot be written.
    """
    from safetensors import SafetensorError

    from rollmill.cli.model_card import CARD, render_model_card
    from rollmill.files import new_folder
    from rollmill.models.classifier import REWARD_MODEL_FOLDER
    from rollmill.models.lora import ADAPTER_FOLDER
    from rollmill.orchestrator.manifest import model_files, verifying

    source = checkpoint / REWARD_MODEL_FOLDER if (checkpoint / REWARD_MODEL_FOLDER).is_dir() else checkpoint
    try:
        with new_folder(out) as folder:
            with verifying(checkpoint, model_files):
                if adapter_only:
                    count = _write_adapter(source, checkpoint / ADAPTER_FOLDER, folder, dtype, base)
                else:
                    count = _write_model(source, folder, dtype)
            for path in base.licence_files:
                shutil.copyfile(path, folder / path.name)
            card = render_model_card(run, settings, step, base, folder, dtype=dtype, name=push or out.resolve().name)
            (folder / CARD).write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {out}: {error}. Free some space or fix the permissions, or choose another folder with --out."
        ) from error
    return {
        **{"out": str(out), "run": str(run), "step": step, "dtype": dtype},
        **{"adapter_only": adapter_only, "parameters": count},
    }


def _write_model(source: Path, target: Path, dtype: str) -> int:
    """Write a model folder with all weights in `dtype`, file by file; returns the number of parameters."""
    from safetensors.torch import save_file

    from rollmill.models.merge import DTYPES as TORCH_DTYPES
    from rollmill.models.merge import INDEX, WEIGHTS, copy_settings, open_merge_source

    count = size = 0
    copy_settings(source, target, dtype)
    with ExitStack() as stack:
        opened = open_merge_source(source, stack)
        for file in opened.files:
            names = [name for name, home in opened.file_of.items() if home == file]
            tensors = {name: _converted(name, opened.tensor(name), TORCH_DTYPES[dtype]) for name in names}
            save_file(tensors, target / file, {"format": "pt"})
            count += sum(tensor.numel() for tensor in tensors.values())
            size += sum(tensor.nbytes for tensor in tensors.values())
        if WEIGHTS not in opened.files:
            index = {"metadata": {"total_size": size, "total_parameters": count}, "weight_map": opened.file_of}
            (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return count


def _write_adapter(checkpoint: Path, adapter: Path, target: Path, dtype: str, base: StartingModel) -> int:
    """Write adapters in peft's format with the tokenizer; returns the number of parameters."""
    from safetensors.torch import load_file, save_file

    from rollmill.models.merge import DTYPES as TORCH_DTYPES

    weights, config = "adapter_model.safetensors", "adapter_config.json"
    read = load_file(adapter / weights)
    tensors = {name: _converted(name, tensor, TORCH_DTYPES[dtype]) for name, tensor in read.items()}
    save_file(tensors, target / weights, {"format": "pt"})
    settings = json.loads((adapter / config).read_text(encoding="utf-8"))
    settings |= {"base_model_name_or_path": base.hub_id or str(base.folder), "inference_mode": True}
    settings |= {"revision": base.revision} if base.revision else {}
    (target / config).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for pattern in _TOKENIZER:
        for path in checkpoint.glob(pattern):
            shutil.copyfile(path, target / path.name)
    return sum(tensor.numel() for tensor in tensors.values())


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    converted = tensor.to(dtype).contiguous()
    if not converted.isfinite().all():
        if tensor.isfinite().all():
            raise ModelError(f"{name} has values beyond the largest {dtype}; choose --dtype bf16 or fp32")
        raise ModelError(f"{name} holds values that are not finite: training broke this model; choose another --step")
    return converted


# The hub


def _require_hub(repository: str) -> None:
    """Check, before anything is written, that one may upload. Raises ConfigError, RollmillError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: not a repository of the hub, such as me/my-model ({error})") from error
    except Exception as error:  # of the network and the hub: of many libraries
        raise RollmillError(f"--push {repository}: {_hub_reason(error)}. Nothing was written.") from error


def _upload(folder: Path, repository: str) -> str:
    """Upload a folder to a repository, a new one of which is private, and return its address. Raises RollmillError."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by rollmill export")
    except Exception as error:  # as above
        raise RollmillError(
            f"--push {repository}: {_hub_reason(error)}. The export is whole in {folder}: "
            f"`hf upload {repository} {folder}` uploads it later."
        ) from error
    return str(url)


def _hub_reason(error: Exception) -> str:
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it"
    if isinstance(error, LocalTokenNotFoundError):
        return "you are not logged in to the Hugging Face hub; run `hf auth login`, or set HF_TOKEN"
    if status in (401, 403):
        return f"the Hugging Face hub refuses your token ({status}); run `hf auth login` with one that may write there"
    if status is not None:
        return f"the Hugging Face hub answers {status}: {_first_line(error)}"
    if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
        return f"the Hugging Face hub cannot be reached ({type(error).__name__}); check the network and HF_ENDPOINT"
    return f"the Hugging Face hub gave an answer that cannot be used ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
