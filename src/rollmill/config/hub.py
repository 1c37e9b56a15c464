"""Models and data sets of the Hugging Face hub: `hf://ORG/NAME[@REVISION]`, or an id where there is no such local path.

huggingface_hub downloads them into its cache (HF_HOME, HF_HUB_CACHE), or finds them there (HF_HUB_OFFLINE). A run uses
the folder of a commit in that cache; config.yaml names the id with the commit, so a resumed run uses the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollmill.errors import ConfigError

HubKind = Literal["model", "dataset"]
PREFIX = "hf://"
_REFERENCE = re.compile(
    r"hf:/{1,2}(?:(?:datasets|models)/)?(?P<id>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?/?"
)  # pathlib makes one slash of two
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(
    r".*/(?P<kind>models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".yaml", ".yml", ".py")
_OTHER_WEIGHTS = ["*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "onnx/*", "original/*"]
"""Files of model repositories beside safetensors."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of the hub; `revision` is a branch, a tag or a commit."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.id}" + ("" if self.revision is None else f"@{self.revision}")


def parse_reference(text: str, folders: Iterable[Path] = ()) -> HubReference | None:
    """Returns the repository that a path of a run file names; None for a local path.

    Args:
        folders: where local paths are looked up. An id whose first part is a folder in one of them is a local path.
    """
    if match := _REFERENCE.fullmatch(text):
        return HubReference(match["id"], match["revision"])
    if not _ID.fullmatch(text) or text.endswith(_FILES):
        return None
    owner = text.partition("/")[0]
    return None if any((folder / owner).is_dir() for folder in folders) else HubReference(text)


def reference_of(folder: Path | str) -> HubReference | None:
    """Returns the repository, with its commit, of a folder in the hub's cache; None for any other folder."""
    match = _SNAPSHOT.fullmatch(str(folder))
    return None if match is None else HubReference(f"{match['owner']}/{match['name']}", match["commit"])


def with_references(value: Any) -> Any:
    """Returns settings with `hf://ID@COMMIT` in the place of folders of the hub's cache."""
    if isinstance(value, dict):
        return {key: with_references(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_references(each) for each in value]
    if not isinstance(value, str):
        return value
    found = reference_of(value) or (_REFERENCE.fullmatch(value) and parse_reference(value))
    return str(found) if found else value


def fetch_named(text: str, reference: HubReference, kind: HubKind) -> Path:
    """`fetch` for a name in a run file, which may have been meant as a local path: then errors say so."""
    try:
        return fetch(reference, kind)
    except ConfigError as error:
        if text.startswith("hf:"):
            raise
        raise ConfigError(f"{text} does not exist here; as a name of the Hugging Face hub: {error}") from error


def fetch(reference: HubReference, kind: HubKind) -> Path:
    """Returns the folder of a repository's commit in the cache; downloads what is missing.

    A commit that is in the cache needs no network.

    Raises ConfigError, in one sentence, if the hub cannot be reached or has no such repository.
    """
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"repo_id": reference.id, "revision": reference.revision, "repo_type": kind}
    if kind == "model":
        options["ignore_patterns"] = _OTHER_WEIGHTS
    try:
        if (cached := _cached(options)) is not None:
            return cached
        folder = Path(snapshot_download(**options))
        if kind == "model" and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(**options | {"ignore_patterns": None}))
    except Exception as error:  # of the network, the hub and its cache: of many libraries
        raise ConfigError(_explain(reference, kind, error)) from error
    return folder


def fetch_config(reference: HubReference) -> Path:
    """Returns a folder with a model's config.json, without its weights. Raises ConfigError like `fetch`."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(reference.id, "config.json", revision=reference.revision)
    except Exception as error:
        raise ConfigError(_explain(reference, "model", error)) from error
    return Path(file).parent


def _cached(options: dict[str, Any]) -> Path | None:
    """Returns the folder of a commit that is completely in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if _COMMIT.fullmatch(options["revision"] or "") is None:
        return None
    try:
        folder = Path(snapshot_download(**options, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    begun = any((folder.parents[1] / "blobs").glob("*.incomplete"))
    weights = options["repo_type"] == "dataset" or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return folder if weights and not begun else None


def _explain(reference: HubReference, kind: HubKind, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what, where, cache = "data set" if kind == "dataset" else "model", constants.ENDPOINT, constants.HF_HUB_CACHE
    missing = isinstance(error, LocalEntryNotFoundError | OSError)
    if isinstance(error, GatedRepoError):
        text = f"its owner has to admit you to this {what}; ask at {where}/{reference.id}, then set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        text = f"{where} has no such {what}, or you may not see it; correct the id, or set HF_TOKEN"
    elif isinstance(error, RevisionNotFoundError):
        text = f"the {what} has no revision `{reference.revision}`; correct what follows the @"
    elif isinstance(error, OfflineModeIsEnabled) or (missing and constants.HF_HUB_OFFLINE):
        text = f"the {what} is not in the cache ({cache}), and HF_HUB_OFFLINE is set; load it once online"
    elif missing:
        text = (
            f"{where} cannot be reached, and the {what} is not in the cache ({cache}); load it once where there is a "
            "network, or give a local folder"
        )
    else:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"{where} gives no such {what} ({reason:.200}); correct the id, or give a local folder"
    return f"{reference}: {text}"
