"""What the documents say about keys, files and modules is complete and current."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.doc_blocks import DOCUMENTS, ROOT, blocks

from rollmill.cli import COMMANDS, main
from rollmill.config.field_docs import document_sections
from rollmill.config.section import Section
from rollmill.config.validation_errors import section_locations

LIBRARIES = sorted(ROOT.glob("libs/*/README.md"))
REFERENCE = [document for document in DOCUMENTS if document.parent.name == "run-file"]

RUN = """\
name: documented
model: {new: {hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, context: 48, tokenizer: {kind: char}}}
taskset: {function: "rollmill.quickstart.addition:rows", options: {size: 6, digits: 1}}
rewards: [{name: format, pattern: "[0-4]"}]
engine: {name: native, cache_gb: 0.1}
rollout:
  {batch: 3, group_size: 2, max_new_tokens: 4, reuse: {top: 30}, ngram_draft: {length: 1},
   repetition: {times: 2, tokens: 2}}
stages:
  - name: both
    steps: 3
    pipeline: [{name: invalid_reward}]
    buffer: {replay: {groups: 1}}
    algorithm: {name: chord, kl: {coefficient: 0.1, target: 0.01}, entropy: 0.01, entropy_control: {},
      corrections: [tis], masks: [high_entropy]}
  - {name: critic, steps: 1, algorithm: {name: ppo}, workflow: {name: tools, describe: false}, tools: [calculator]}
  - {name: cut, steps: 2, max_staleness: 1, rollout: {token_budget: 8, reuse: null}}
  - {name: more, steps: 1, rollout: {oversample: 0.5, reuse: null}}
  - {name: flow, steps: 1, workflow: picky, rollout: {attempts: 2}}
  - {name: odds, steps: 1, algorithm: {name: orpo, batch: 2}, taskset: {fields: {rejected: answer}}}
  - {name: labels, steps: 1, algorithm: {name: kto, batch: 2}, taskset: {fields: {rejected: answer}}}
  - name: self
    steps: 1
    algorithm: {name: self_distill, context: success, success_at_least: 0.0, template: "{prompt}{context}"}
  - {name: pairs, steps: 1, algorithm: {name: reward_model, batch: 2}, taskset: {fields: {rejected: answer}}}
plugins: [flow.py]
evaluation: {taskset: {function: "rollmill.quickstart.addition:rows", options: {size: 4, seed: 1, digits: 1}}}
monitor: {tensorboard: true}
"""
FLOW = """\
import rollmill

tried = set()

@rollmill.workflow
async def picky(task, policy, judge):
    first = await policy.complete(task.prompt)
    reply = await policy.complete([*first.token_ids, *policy.encode("0")])
    if not tried:
        tried.add(task.id)
        raise ValueError("once")
    return None if int(task.id.rpartition(":")[2]) % 2 else await judge(reply)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with as many metrics as possible."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.yaml").write_text(RUN)
    (folder / "flow.py").write_text(FLOW)
    assert main(["run", str(folder / "run.yaml"), "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_the_reference_of_run_files_is_current() -> None:
    command = [sys.executable, "docs/run_file_reference.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_every_row_of_the_reference_is_one_line_with_four_cells() -> None:
    """Defaults of several lines would end a table."""
    text = "\n".join(page.read_text() for page in REFERENCE if page.name != "README.md")
    tables = [table.partition("\n\n")[0] for table in text.split("| key | value |")[1:]]
    rows = [line for table in tables for line in table.splitlines()[1:]]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 5 or not row.endswith("|")] == []
    assert '| `cue` | text | `"\\n\\nWait, that is not right. Let me try again.\\n\\n"` |' in text


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.stem)
def test_a_page_of_the_reference_begins_with_a_purpose_and_an_example(page: Path) -> None:
    """tests/docs/test_commands.py loads the example."""
    title, purpose, *rest = page.read_text().partition("<!-- Generated")[0].split("\n\n")
    assert title.startswith("# ")
    assert purpose[0].isalpha() or purpose[0] == "`"
    examples = [yaml.safe_load(block.text) for block in blocks(page, "yaml")]
    sections = set(re.findall(r"`(\w+)", title))
    assert examples
    assert sections <= {key for example in examples for key in example}
    assert any("../guide/" in part for part in rest) or "](../guide/" in purpose or page.name == "README.md"


def test_every_key_has_a_meaning() -> None:
    document_sections()
    silent = [
        f"{home.prefix}.{key} ({home.section.__name__})"
        for home in section_locations()
        for key, field in home.section.model_fields.items()
        if not field.description and key != "name" and not _inherits_meaning(home.section, key)
        if isinstance(field.default, str | int | float)
    ]
    assert silent == []


def _inherits_meaning(section: type[Section], key: str) -> bool:
    return any(key in base.model_fields and base.model_fields[key].description for base in section.__mro__[1:-2])


def test_every_metric_is_described(run_dir: Path) -> None:
    described = _keys("metrics.jsonl")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    unknown = {name for name in names if name not in described and not _placeholder(name) & described}
    assert unknown == set()
    elsewhere = {"rollout/captured/share", "rollout/captured/captures"}  # on a GPU: tests/simulated_gpu
    everywhere = {name for name in described if not re.search("[A-Z]", name)} - elsewhere
    assert everywhere <= names, "described, but not written"


def test_every_summary_key_is_described(run_dir: Path) -> None:
    assert set(json.loads((run_dir / "summary.json").read_text())) == _keys("summary.json")


def test_every_experience_key_is_described(run_dir: Path) -> None:
    row = json.loads((run_dir / "rollouts/step-000001.jsonl").read_text().splitlines()[0])
    text = (ROOT / "docs/guide/run-directory.md").read_text().partition("## rollouts")[2].partition("\n## ")[0]
    assert [key for key in row if key != "step" and f"`{key}`" not in text] == []


def test_every_file_of_a_run_is_described(run_dir: Path) -> None:
    text = (ROOT / "docs/guide/run-directory.md").read_text()
    assert [path.name for path in run_dir.iterdir() if f"`{path.name}" not in text] == []


def test_the_architecture_names_all_packages_and_no_path_that_is_gone() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    source = ROOT / "src/rollmill"
    packages = {path.parent.relative_to(source).as_posix() for path in source.rglob("__init__.py")} - {"."}
    assert {package for package in packages if f"`{package}/`" not in text} == set()
    assert len(text.splitlines()) <= 200


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/design-notes.md"])
def test_paths_in_pages_for_developers_exist(page: str) -> None:
    found = re.findall(r"`([\w./-]+(?:/|\.(?:py|yaml|md|json|toml)))`", (ROOT / page).read_text())
    paths = {path for path in found if "NAME" not in path}
    assert paths
    roots = (ROOT, ROOT / "src/rollmill")
    assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []


def test_every_command_is_named() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert [command for command in COMMANDS if not re.search(rf"`(rollmill )?{command}`", text)] == []


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "CHANGELOG.md", *LIBRARIES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link names a file that exists, and every anchor a heading in it."""
    links = re.findall(r"\]\(([^)\s]+)\)", _without_code(document.read_text()))
    local = [link.partition("#") for link in links if not link.startswith(("http://", "https://"))]
    targets = [(document.parent / path if path else document, anchor) for path, _, anchor in local]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    assert [f"{path.name}#{anchor}" for path, anchor in targets if anchor and anchor not in _anchors(path)] == []


@pytest.mark.parametrize("folder", ["src", "libs", "examples", "tests", "bench"])
def test_pages_named_in_sources_exist(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    named = {page for source in sources for page in re.findall(r"docs/[\w/-]+\.md", source.read_text())}
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("key", ["rewards", "algorithm"])
def test_explain_names_a_page_that_exists(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 0
    assert (ROOT / re.findall(r"docs/run-file/[\w-]+\.md", capsys.readouterr().out)[0]).is_file()


@cache
def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", _without_code(page.read_text()), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


def _without_code(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _keys(section: str) -> set[str]:
    """Keys in the first column of a table of docs/guide/run-directory.md."""
    text = (ROOT / "docs/guide/run-directory.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for cell in rows for key in re.findall(r"`([^`]+)`", cell)}


def _placeholder(name: str) -> set[str]:
    """`seconds/train` may be described as `seconds/PHASE`."""
    head, _, tail = name.partition("/")
    middle, _, last = tail.rpartition("/")
    inside = {f"{head}/REWARD/{last}", f"{head}/NAME/{last}", f"{head}/NAME/REASON", f"{head}/{middle}/REASON"}
    return {f"{head}/{word}" for word in ("PART", "TERM", "PHASE", "NAME", "KEY")} | inside
