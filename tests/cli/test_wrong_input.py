"""What users get wrong: the real command line says what, where and what to do, with the documented exit code.

Mistakes that can be seen in the run file alone are in tests/config.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import Ended, Forks
from support.tiny import GRPO, HELD_OUT, SFT, tiny_run
from support.toys import toy_checkpoint

FAILED, USAGE = 1, 2
NOBODY = 65534
ROW = {"prompt": "1+1\n", "answer": "2", "response": "#2"}
RL = {"stages": None, "steps": 2, "evaluation": None, "algorithm": {"name": "grpo"}}
IMITATE = RL | {"algorithm": {"name": "sft"}, "rewards": None, "rollout": None, "steps": 3}
FROM_FILE = {"function": None, "options": None, "path": "tasks.jsonl"}


@dataclass
class Case:
    """A mistake: files beside the run file, changes to the run file, and what the message has to say."""

    name: str
    says: Sequence[str]
    code: int = FAILED
    changes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda folder: None
    argv: Sequence[str] = ("run", "run.yaml", "--out", "out")
    uid: int | None = None


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def tasks(*rows: Any, **keys: Any) -> tuple[dict[str, Any], dict[str, str | bytes]]:
    """Changes and files of a taskset with these rows."""
    return {"taskset": FROM_FILE | keys}, {"tasks.jsonl": lines(*rows)}


def spoilt(folder: Path, name: str, content: bytes) -> None:
    """A run directory `out` in which one file holds something else."""
    (folder / "out").mkdir()
    (folder / "out" / "config.yaml").write_text("name: x\nsteps: 2\n")
    (folder / "out" / name).write_bytes(content)


def started(folder: Path, machine: bytes) -> None:
    """A run directory `out` that holds what a run writes first, with this machine.json."""
    from rollmill.config.loader import load_run

    spoilt(folder, "machine.json", machine)
    (folder / "out" / "config.yaml").write_text(load_run(folder / "run.yaml").to_yaml())


def data_case(name: str, rows: Sequence[Any], says: Sequence[str], base: dict[str, Any] = RL, **keys: Any) -> Case:
    changes, files = tasks(*rows, **keys)
    return Case(name, says, changes=base | changes, files=files)


LONG = {"prompt": "7" * 80 + "\n", "answer": "2", "response": "#2"}
LONG_ANSWER = ROW | {"response": "7" * 80}
DATA = [
    data_case("empty taskset", [], ["taskset tasks is empty", "tasks.jsonl", "has no rows"]),
    data_case("bad JSON line", [ROW, '{"prompt": 1'], ["tasks.jsonl:2", "1 of 2 rows", "on_bad_row: skip"]),
    data_case("every row bad", ["{", "["], ["no tasks: all 2 rows were skipped", "tasks.jsonl:1"], on_bad_row="skip"),
    data_case("template names a missing field", [ROW], ["question", "tasks.jsonl:1"], template="{question}="),
    data_case("field names a missing column", [ROW], ["gold", "taskset.fields.answer"], fields={"answer": "gold"}),
    data_case(
        "prompt longer than the context",
        [ROW, LONG],
        ["1 of 2 prompts", "context of 64 tokens", "task tasks:1", "81 tokens", "on_bad_row: skip"],
    ),
    data_case("every prompt longer than the context", [LONG], ["1 of 1 prompts", "longer context"], on_bad_row="skip"),
    data_case(
        "demonstration longer than the context",
        [ROW, LONG_ANSWER],
        ["1 of 2 demonstrations", "context of 64", "task tasks:1", "85 tokens"],
        IMITATE,
    ),
    data_case(
        "demonstration longer than the context in MIX",
        [ROW, LONG_ANSWER],
        ["1 of 2 demonstrations", "task tasks:1"],
        RL | {"algorithm": {"name": "mix"}},
    ),
    data_case(
        "SFT without worked solutions",
        [{"prompt": "1+1", "answer": "2"}],
        ["algorithm sft", "taskset.fields.response"],
        IMITATE,
    ),
    data_case(
        "no reference answers",
        [{"prompt": "1+1"}],
        ["stage train, step 1", "(exact)", "first: task tasks:0", "taskset.fields.answer"],
        RL | {"rewards": [{"name": "exact"}]},
    ),
    Case(
        "held-out prompt longer than the context",
        ["taskset held", "1 of 1 prompts", "81 tokens"],
        changes={"evaluation": {"taskset": {"function": None, "options": None, "path": "held.jsonl"}}},
        files={"held.jsonl": lines(LONG)},
    ),
    Case(
        "damaged Parquet file",
        ["tasks.parquet"],
        changes=RL | {"taskset": FROM_FILE | {"path": "tasks.parquet"}},
        files={"tasks.parquet": b"PAR1 no"},
    ),
    Case(
        "function that raises",
        ["rows.py", "no luck"],
        changes=RL | {"taskset": {"function": "rows.py:rows", "options": None}},
        files={"rows.py": "def rows():\n    raise OSError('no luck')\n"},
    ),
    Case(
        "function with wrong options",
        ["addition:rows", "colour"],
        changes=RL | {"taskset": {"options": {"colour": 1}}},
    ),
    Case(
        "unknown reasoning-gym generator",
        ["chain_sums", "chain_sum"],
        changes=RL | {"taskset": {"function": None, "options": None, "generator": {"name": "chain_sums"}}},
    ),
    Case(
        "reasoning-gym generator with an unknown option",
        ["chain_sum", "min_termz"],
        changes=RL
        | {
            "taskset": {
                "function": None,
                "options": None,
                "generator": {"name": "chain_sum", "options": {"min_termz": 2}},
            }
        },
    ),
]

CHECKPOINT = RL | {"model": {"path": "toy", "new": None}, "rewards": [{"name": "format", "pattern": "a"}]}


def toy(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Prepare a good checkpoint and spoil it."""

    def prepare(folder: Path) -> None:
        toy_checkpoint(folder / "toy", "qwen3", num_hidden_layers=1)
        change(folder / "toy")

    return prepare


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def no_end(folder: Path) -> None:
    edit("config.json", eos_token_id=None)(folder)
    edit("generation_config.json", eos_token_id=None)(folder)
    edit("tokenizer_config.json", eos_token=None)(folder)


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def smaller_vocabulary(folder: Path) -> None:
    from support.toys import toy_model, toy_tokenizer

    from rollmill.models.from_scratch import save_policy

    shutil.rmtree(folder)
    save_policy(toy_model("qwen3", 100, eos_token_id=1), toy_tokenizer(), folder)


def model_case(name: str, spoil: Callable[[Path], None], *says: str, **changes: Any) -> Case:
    return Case(name, ["toy", *says], changes=CHECKPOINT | changes, prepare=toy(spoil))


MODELS = [
    model_case("model folder without tokenizer", no_tokenizer, "no tokenizer", "copy the tokenizer files"),
    model_case("no end-of-sequence token", no_end, "no end-of-sequence token", "eos_token_id"),
    model_case("vocabulary mismatch", smaller_vocabulary, "embeddings for 100", "tokenizer the model was trained with"),
    model_case("damaged weights", truncated, "the weights cannot be read"),
    model_case("no weights", lambda folder: (folder / "model.safetensors").unlink(), "no weights", "incomplete"),
    model_case("damaged config.json", lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    model_case("unknown architecture", edit("config.json", model_type="nothing"), "config.json", "nothing"),
    Case(
        "chat without a chat template",
        ["task rows:0", "no chat template", "taskset.chat"],
        changes=CHECKPOINT | {"taskset": {"chat": True}},
        prepare=toy(lambda folder: (folder / "chat_template.jinja").unlink()),
    ),
]


def reward_case(name: str, source: str, *says: str, **changes: Any) -> Case:
    rewards = [{"name": "python", "function": "mine.py:mine"} | changes.pop("reward", {})]
    return Case(name, says, changes=RL | {"rewards": rewards} | changes, files={"mine.py": source})


GROUP = "def mine(task, completions):\n    return {}\nmine.group = True\n"
PLAIN = "def mine(task, completion):\n    return {}\n"
REWARDS = [
    reward_case("reward that raises", PLAIN.format("1 / 0"), "reward `mine`", "task `rows:", "ZeroDivisionError"),
    reward_case("reward that returns text", PLAIN.format("'good'"), "`mine`", "task `rows:", "'good'", "a number"),
    reward_case("reward that returns NaN", PLAIN.format("float('nan')"), "`mine`", "task `rows:", "finite"),
    reward_case("reward that never applies", PLAIN.format("None"), "(mine)", "any of the 16 completions"),
    reward_case("group reward with a wrong count", GROUP.format("[1.0]"), "`mine`", "1 values for 4 completions"),
    reward_case("group reward that returns a number", GROUP.format("1.0"), "`mine`", "list with one value"),
    reward_case(
        "reward that hangs",
        "import time\ndef mine(task, completion):\n    time.sleep(1000)\n",
        "mine.py:mine",
        "did not return within 0.05 s",
        "make the function stop by itself",
        reward={"time_limit_s": 0.05, "run_in": "thread"},
    ),
    reward_case(
        "reward that outlasts the deadline",
        "import asyncio\nasync def mine(task, completion):\n    await asyncio.sleep(1000)\n",
        "the trainer waited 5 s",
        "4 of 4 groups",
        "rollout.deadline_s",
        rollout={"deadline_s": 5},
        supervise={"restarts": 0},
    ),
    reward_case(
        "reward that outlasts the deadline of an evaluation",
        "import asyncio\nasync def mine(task, completion):\n    await asyncio.sleep(1000)\n",
        "the evaluation waited 1 s",
        "6 held-out tasks",
        rollout={"deadline_s": 1},
        evaluation={"taskset": HELD_OUT},
        early_stop={"patience": 1},
        supervise={"restarts": 0},
    ),
    reward_case(
        "evaluation whose reward never applies",
        PLAIN.format("None"),
        "the evaluation: no reward (mine)",
        "any of the 12 completions",
        evaluation={"taskset": HELD_OUT},
    ),
]

SETUP = [
    Case(
        "reward file with a syntax error",
        ["mine.py:1", "syntax error"],
        USAGE,
        RL | {"rewards": [{"name": "python", "function": "mine.py:mine"}]},
        {"mine.py": "def mine(:\n"},
    ),
    Case(
        "reward function that is not in its file",
        ["mine.py", "`mines`", "did you mean `mine`"],
        USAGE,
        RL | {"rewards": [{"name": "python", "function": "mine.py:mines"}]},
        {"mine.py": PLAIN.format("1")},
    ),
    Case(
        "reward function with other arguments",
        ["mine.py:mine", "(task, completion)"],
        USAGE,
        RL | {"rewards": [{"name": "python", "function": "mine.py:mine"}]},
        {"mine.py": "def mine():\n    return 1\n"},
    ),
    Case(
        "reward function of a later stage missing",
        ["no reward `nowhere`", "plugins"],
        USAGE,
        {"stages": [SFT, GRPO | {"rewards": [{"name": "python", "function": "nowhere"}]}]},
    ),
    Case(
        "plugin that raises",
        ["plug.py:2", "KeyError"],
        USAGE,
        RL | {"plugins": ["plug.py"]},
        {"plug.py": "table = {}\ntable['x']\n"},
    ),
    Case("CUDA without a CUDA device", ["device: cuda", "device: auto or cpu"], USAGE, RL | {"device": "cuda"}),
    Case("no threads", ["threads", "1"], USAGE, RL | {"threads": 0}),
    Case(
        "stages of different precision",
        ["trainer.precision", "bf16, fp32"],
        USAGE,
        {"stages": [SFT, GRPO | {"trainer": {"precision": "bf16"}}]},
    ),
    Case(
        "loss that is not finite",
        ["training step 1", "loss", "tasks rows:", "Lower trainer.lr"],
        changes=IMITATE | {"trainer": {"lr": 1e30}},
    ),
    Case("model that broke", ["training step 1", "not finite", "trainer.lr"], changes=RL | {"trainer": {"lr": 1e30}}),
]

COMMANDS = [
    Case("no run file", ["nothing.yaml"], USAGE, argv=("run", "nothing.yaml")),
    Case("no argument", ["Missing argument"], USAGE, argv=("run",)),
    Case("unknown option", ["--outs"], USAGE, argv=("run", "run.yaml", "--outs", "x")),
    Case("unknown command", ["runs"], USAGE, argv=("runs", "run.yaml")),
    Case("resuming what is no run", ["here holds no run", "config.yaml"], USAGE, argv=("resume", "here")),
    Case("evaluating what is no run", ["here holds no run", "config.yaml"], USAGE, argv=("eval", "here")),
    Case("showing what is no run", ["here is no folder"], USAGE, argv=("show", "here")),
    Case(
        "--out is a file",
        ["out is a file", "another folder with --out"],
        USAGE,
        RL,
        files={"out": "text"},
    ),
    Case(
        "--out cannot be written",
        ["out", "Permission denied", "another folder with --out"],
        changes=RL,
        prepare=lambda folder: folder.chmod(0o555),
        uid=NOBODY if os.getuid() == 0 else None,  # root may write anywhere
    ),
]

LONG_PATH = "x" * 5000
WRONG_PATHS = [
    Case(f"{words[0]} of a path that is too long", ["File name too long"], FAILED, argv=words)
    for words in (("show", LONG_PATH), ("serve", LONG_PATH), ("merge", LONG_PATH, LONG_PATH, "--out", "m"))
]
FILES = [
    *WRONG_PATHS,
    Case(
        "--out is too long", ["File name too long", "--out"], argv=("run", "run.yaml", "--out", LONG_PATH), changes=RL
    ),
    Case("runs is a file", ["runs/tiny", "--out"], argv=("run", "run.yaml"), changes=RL, files={"runs": "x"}),
    Case(
        "threads beyond all machines",
        ["threads", "at most"],
        USAGE,
        argv=("check", "run.yaml", "--set", "threads=99999"),
    ),
    Case(
        "database with a port of letters",
        ["buffer.url is no SQLAlchemy URL"],
        changes=RL | {"buffer": {"store": "sql", "url": "sqlite://a:b/c"}},
    ),
    Case(
        "plugin that is no text",
        ["p.py: syntax error", "null bytes"],
        USAGE,
        files={"p.py": b"\0\xff"},
        argv=("algorithms", "--plugin", "p.py"),
    ),
    Case(
        "program that never ends",
        ["FILE pipe", "which may have no end"],
        USAGE,
        prepare=lambda folder: os.mkfifo(folder / "pipe"),
        argv=("sandbox", "run", "pipe"),
    ),
    Case(
        "time limit that is no number",
        ["--time-limit-s nan", "finite"],
        USAGE,
        files={"in": "{}"},
        argv=("testcases", "--input", "in", "--output", "out", "--time-limit-s", "nan"),
    ),
    *(
        Case(
            f"resuming a run whose config.yaml is {name}",
            ["out/config.yaml", says],
            USAGE,
            prepare=lambda folder, content=content: spoilt(folder, "config.yaml", content),
            argv=("resume", "out"),
        )
        for name, content, says in (
            ("deep", b"a: " + b"[" * 20_000, "more than 50 levels"),
            ("binary", b"\0\xff", "cannot be read as UTF-8 text"),
            ("empty", b"", "is empty"),
        )
    ),
    *(
        Case(
            f"{command} a run whose {name} is {kind}",
            [f"out/{name}", says],
            prepare=lambda folder, name=name, content=content: spoilt(folder, name, content),
            argv=(command, "out"),
        )
        for command, name, says in (
            ("status", "summary.json", "is damaged"),
            ("show", "summary.json", "is damaged"),
            ("show", "metrics.jsonl", "is not JSON"),
        )
        for kind, content in (("deep", b"[" * 20_000 + b"\n"), ("a list", b"[1]\n"), ("binary", b"\0\xff\n"))
    ),
    *(
        Case(
            f"resuming a run whose machine.json is {kind}",
            ["out/machine.json is damaged", "put the file back"],
            changes=RL,
            prepare=lambda folder, content=content: started(folder, content),
            argv=("resume", "out"),
        )
        for kind, content in (("deep", b"[" * 20_000), ("a list", b"[1]"), ("binary", b"\0\xff"), ("empty", b"{}"))
    ),
    *(
        Case(
            f"grading {name}",
            says,
            USAGE,
            files={"g.jsonl": content},
            argv=("grade", "--reward", "math", "--input", "g.jsonl", *more),
        )
        for name, content, more, says in (
            ("a key twice", '{"response": "5", "response": "6"}', (), ["g.jsonl:1", "'response' is given twice"]),
            ("NaN", '{"response": "5", "answer": NaN}', (), ["g.jsonl:1", "NaN is not JSON"]),
            ("brackets", '{"response": "5", "answer": ' + "[" * 20_000, (), ["g.jsonl:1", "too deep"]),
            ("UTF-16", '{"response": "5"}'.encode("utf-16"), (), ["g.jsonl:1", "looks like UTF-16"]),
            (
                "by a deep option",
                '{"response": "5"}',
                ("--option", "weight=" + "[" * 20_000),
                ["--option", "50 levels"],
            ),
            ("by digits", '{"response": "5"}', ("--option", "weight=" + "9" * 5000), ["--option", "too large"]),
            ("by a date", '{"response": "5"}', ("--option", "weight=2020-99-99"), ["weight"]),
        )
    ),
    Case(
        "grading onto a full disk",
        ["/dev/full", "No space left"],
        files={"g.jsonl": '{"response": "5", "answer": "5"}'},
        argv=("grade", "--reward", "math", "--input", "g.jsonl", "--output", "/dev/full"),
    ),
]

CASES = [*FILES, *DATA, *MODELS, *REWARDS, *SETUP, *COMMANDS]
NOBODY = 65534


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input(server: Forks, tmp_path: Path, case: Case) -> None:
    ended = attempt(server, tmp_path, case)
    for text in case.says:
        assert text in ended.err, ended.err
    assert ended.code == case.code
    assert "Traceback" not in ended.err
    assert "never" not in ended.err  # what asyncio says of forgotten tasks and exceptions
    assert len(ended.err.splitlines()) < 12


def attempt(server: Forks, folder: Path, case: Case) -> Ended:
    if case.code == USAGE and "cuda" in case.name.lower() and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    tiny_run(folder, **case.changes)
    for name, content in case.files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    case.prepare(folder)
    return server.run(*case.argv, folder=folder, uid=case.uid)
