"""The tokenizer saved with a run, so that later readers of its experiences encode text as the run did. Imports no
torch.

RUN/tokenizer/ is a Hugging Face folder with `run.json`: the id that ends a demonstration, a fingerprint of the
vocabulary, the encoding of a probe text when the folder was written, the ids that end a turn, and the date of the
run's start, which chat templates print that ask for today's.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.errors import CorruptFileError, ModelError
from rollmill.files import explain_write_errors, read_json_object, sync, temporary_path

TOKENIZER_FOLDER, TOKENIZER_INFO_FILE = "tokenizer", "run.json"
_PROBE = "Ünï 12+34=46?\n\n  def f(x): return 'a'\t<b> 你好 🙂"


class RunTokenizer(NamedTuple):
    """Tokenizer of a run."""

    tokenizer: Any
    end_id: int  #: end-of-sequence id appended to demonstrations
    fingerprint: str


def compute_fingerprint(tokenizer: Any) -> str:
    """16 hexadecimal digits, equal for the same tokens with the same ids, added tokens included."""
    tokens = sorted((index, str(token)) for token, index in tokenizer.get_vocab().items())
    return sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def use_run_date(run_dir: Path, tokenizer: Any) -> None:
    """Makes the tokenizer's chat template print the date of the run's start: that of RUN/tokenizer, else today's."""
    about: dict[str, Any] = {}
    with suppress(OSError, CorruptFileError):
        about = read_json_object(run_dir / TOKENIZER_FOLDER / TOKENIZER_INFO_FILE)
    tokenizer.template_day = date.fromisoformat(about["date"]) if about else date.today()
    tokenizer.stop_ids = frozenset(about["stop_ids"] if about else getattr(tokenizer, "stop_ids", None) or ())
    tokenizer.renderer = None  # it is made again, with the date


def save_run_tokenizer(run_dir: Path, tokenizer: Any, end_id: int) -> None:
    """Writes RUN/tokenizer atomically; keeps an existing one with the same vocabulary, end and date.

    Raises:
        RollmillError: the folder cannot be written.
    """
    folder, mark = run_dir / TOKENIZER_FOLDER, compute_fingerprint(tokenizer)
    day = getattr(tokenizer, "template_day", None) or date.today()
    about = {"end_id": end_id, "fingerprint": mark, "probe": _encoded(tokenizer), "date": day.isoformat()}
    about["stop_ids"] = sorted(getattr(tokenizer, "stop_ids", None) or [end_id])
    with suppress(CorruptFileError):  # it is written again
        if (folder / TOKENIZER_INFO_FILE).is_file() and read_json_object(folder / TOKENIZER_INFO_FILE) == about:
            return
    temporary = temporary_path(folder)
    with explain_write_errors(folder):
        try:
            tokenizer.save_pretrained(temporary)
            (temporary / TOKENIZER_INFO_FILE).write_text(json.dumps(about))
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def load_run_fingerprint(run_dir: Path) -> str:
    """Returns the fingerprint of the run's tokenizer without loading it.

    Raises:
        ModelError: the run has none.
    """
    return str(_about(run_dir)["fingerprint"])


def load_run_tokenizer(run_dir: Path) -> RunTokenizer:
    """Loads the run's tokenizer, with the id that ends a demonstration.

    Raises:
        ModelError: the run has none, or it no longer encodes as it did.
    """
    about, folder = _about(run_dir), run_dir / TOKENIZER_FOLDER
    tokenizer = _read(folder, about)
    if compute_fingerprint(tokenizer) != about["fingerprint"] or _encoded(tokenizer) != about["probe"]:
        raise ModelError(
            f"{folder} does not encode text as it did when the run wrote it; its files were changed, or this version "
            "of transformers reads them differently. Restore the files, or install the version that the run used."
        )
    use_run_date(run_dir, tokenizer)
    return RunTokenizer(tokenizer, int(about["end_id"]), str(about["fingerprint"]))


def _read(folder: Path, about: dict[str, Any]) -> Any:
    """Loads the plain tokenizer.json if that encodes the same (which imports no torch), else the tokenizer's
    own class.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # suppresses a warning about the class
    try:
        if (folder / "tokenizer.json").is_file():
            plain = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            if _encoded(plain) == about["probe"]:
                return plain
        from rollmill.models.load import read_tokenizer

        return read_tokenizer(folder, {"local_files_only": True})
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error
    finally:
        logging.set_verbosity(level)


def _encoded(tokenizer: Any) -> list[int]:
    return [int(token) for token in tokenizer.encode(_PROBE)]


def _about(run_dir: Path) -> dict[str, Any]:
    path = run_dir / TOKENIZER_FOLDER / TOKENIZER_INFO_FILE
    try:
        return read_json_object(path)
    except FileNotFoundError as error:
        raise ModelError(
            f"{run_dir} holds no {TOKENIZER_FOLDER}/{TOKENIZER_INFO_FILE}: it has not started yet, or the folder was "
            "removed; `rollmill resume` writes it"
        ) from error
    except CorruptFileError as error:
        raise ModelError(f"{path} is not a JSON object ({error}); remove {path.parent} and resume the run") from error
