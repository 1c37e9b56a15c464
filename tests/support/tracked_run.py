"""Runs FOLDER/run.yaml, repeats its last steps as after a kill, and prints as JSON what each tracker's package reads.

It is for the interpreter that has these packages.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any


def read_wandb(run: Path) -> dict[str, Any]:
    """The history rows of all parts of the run, and its settings, from the offline files."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader  # W&B itself exports no reader
    from wandb.proto import wandb_internal_pb2

    rows, ids, settings = [], set(), {}
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(path)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                kind = record.WhichOneof("record_type")
                if kind == "history":
                    rows.append(
                        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                    )
                elif kind == "run":
                    ids.add(record.run.run_id)
                    settings |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
    return {"rows": rows, "ids": sorted(ids), "settings": settings}


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("rollmill")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    data, run_id = runs[0].data, runs[0].info.run_id
    history = {key: [(m.step, m.value) for m in client.get_metric_history(run_id, key)] for key in data.metrics}
    texts = [each.path for each in client.list_artifacts(run_id, "completions")]
    return {"runs": [each.info.status for each in runs], "history": history, "params": data.params, "texts": texts}


def read_trackio() -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("rollmill"))
    rows = SQLiteStorage.get_logs("rollmill", runs[0].name, run_id=runs[0].id)
    return {"runs": [each.name for each in runs], "rows": rows, "settings": runs[0].config}


def read_swanlab(run: Path) -> dict[str, Any]:
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = []
    for path in sorted(run.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        found.append(b"".join(reader).decode("latin-1"))
        reader.close()
    return {"files": found, "texts": [path.read_text() for path in sorted(run.glob("swanlog/run-*/media/text/*.txt"))]}


def read_aim(folder: Path) -> dict[str, Any]:
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager
    from aim.storage.context import Context

    repo = Repo(str(folder / "aim"))
    for name in repo.list_all_runs():
        RepoIndexManager.get_index_manager(repo).index(name)  # as `aim up` does
    runs = list(repo.iter_runs())
    history = {each.name: [(step, value) for step, (value, *_) in each.data.items()] for each in runs[0].metrics()}
    sequences = [runs[0].get_text_sequence(f"completion/{number}", Context({})) for number in (0, 1)]
    texts = [text.data for each in sequences for _, (text, *_) in each.data.items()]
    return {
        "runs": [[each.name, each.experiment] for each in runs],
        "settings": runs[0]["run_file"],
        "history": history,
        "texts": texts,
    }


def run_and_resume(folder: Path) -> Path:
    import rollmill

    rollmill.run(folder / "run.yaml", out=folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step-000004")
    rollmill.resume(folder / "run")
    return folder / "run"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        run = run_and_resume(folder)
        found = {"wandb": read_wandb(run), "mlflow": read_mlflow(folder), "trackio": read_trackio()}
        found |= {"swanlab": read_swanlab(run), "aim": read_aim(folder)}
    print(json.dumps(found))
