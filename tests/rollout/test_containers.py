"""Containers of rollouts without an engine: options, checks, errors, patches, archives."""

from __future__ import annotations

import difflib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import tiny_run

from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError
from rollmill.rewards.builtin.container import NO_RESULT, score_of
from rollmill.rollout.containers import engine as engines
from rollmill.rollout.containers.archive import folder_digest, pack, pack_bytes, unpack_file
from rollmill.rollout.containers.container import _Kept
from rollmill.rollout.containers.engine import ContainerEngine, OwnedContainer, find_engine, this_process
from rollmill.rollout.containers.patch import PatchError, parse_patch
from rollmill.rollout.environments.builtin.container import ContainerEnvironment
from rollmill.types import SEALED, Task

CONTAINER = {"name": "container", "image": "localhost/none"}
REWARD = {"name": "container", "command": "true"}
AGENT: dict[str, Any] = {"workflow": "react", "environment": CONTAINER, "tools": ["shell"], "rewards": [REWARD]}


def run_file(folder: Path, **changes: Any) -> Path:
    """A run whose policy works in containers, with changes."""
    return tiny_run(folder, stages=None, steps=1, algorithm="grpo", evaluation=None, **AGENT | changes)


# -- the run file ----------------------------------------------------------------------------------------------


def test_a_run_with_containers_is_valid_where_no_engine_is_there(tmp_path: Path) -> None:
    loaded = load_run(run_file(tmp_path))
    environment = loaded.stages[0].environment
    assert isinstance(environment, ContainerEnvironment)
    assert environment.network == "none"
    assert load_run(run_file(tmp_path, tools=None, rewards=[REWARD], workflow={"name": "program", "command": ["true"]}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"environment": None}, r"tools.0: `shell` works in the rollout's container; add the section environment"),
        ({"environment": None, "tools": ["calculator"]}, r"rewards.0: `container` looks into the rollout's conta"),
        ({"environment": "reasoning_gym"}, "shell` works in the rollout's container"),
        ({"tools": ["calculator"], "rewards": [{"name": "exact"}]}, "environment: not honoured: nothing of workflow"),
        ({"workflow": "single_turn", "tools": None}, "`container` looks at what an agent has done, and workflow"),
        (
            {"workflow": "environment", "tools": None, "rewards": None},
            "workflow `environment` acts in episodes, and `container` has none; use workflow `tools`",
        ),
        (
            {"workflow": {"name": "program", "command": ["true"], "inside": True}, "tools": None},
            "inside: it needs environment: {name: container, network: host",
        ),
        (
            {
                "workflow": {"name": "program", "command": ["true"], "inside": True, "folder": "/"},
                "tools": None,
                "environment": CONTAINER | {"network": "host"},
            },
            "folder: not honoured with inside",
        ),
        ({"environment": CONTAINER | {"dockerfile": "."}}, "`image` and `dockerfile` both give the image"),
        ({"environment": CONTAINER | {"processes": 2}}, "not honoured by `container`, whose rollouts are apart"),
        ({"environment": CONTAINER | {"memory_gb": 2}}, "memory_gb: not honoured"),
        ({"environment": CONTAINER | {"files": {"here": "."}}}, "paths in the container that begin with /, found `her"),
        ({"environment": CONTAINER | {"engine": "lxc"}}, "environment.engine"),
        ({"environment": {"name": "container", "dockerfile": "nowhere"}}, "nowhere does not exist"),
        ({"rewards": [REWARD | {"result": "guess"}]}, r"rewards.0.*result"),
        ({"rewards": [REWARD | {"files": {"/tests": "nowhere"}}]}, "nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run(run_file(tmp_path, **changes))


def test_an_evaluation_set_in_containers_is_checked_as_a_stage_is(tmp_path: Path) -> None:
    held_out = {"taskset": {"function": "rollmill.quickstart.addition:rows"}, "environment": CONTAINER}
    path = run_file(tmp_path, environment=None, tools=None, workflow="single_turn", rewards=[{"name": "exact"}])
    run = yaml.safe_load(path.read_text()) | {"evaluation": held_out}
    path.write_text(yaml.safe_dump(run))
    with pytest.raises(ConfigError, match=r"evaluation.*environment: not honoured: nothing of workflow `single_turn`"):
        load_run(path)


def test_paths_are_those_of_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "tests").mkdir()
    path = run_file(
        tmp_path,
        environment={"name": "container", "dockerfile": "image", "files": {"/data": "tests"}},
        rewards=[REWARD | {"files": {"/tests": "tests"}}],
    )
    monkeypatch.chdir("/")
    stage = load_run(path).stages[0]
    assert isinstance(stage.environment, ContainerEnvironment)
    assert stage.environment.dockerfile == tmp_path / "image"
    assert stage.environment.files == {"/data": tmp_path / "tests"}
    assert stage.rewards[0].files == {"/tests": tmp_path / "tests"}  # type: ignore[attr-defined]


def test_a_task_may_name_an_image_and_limits_of_its_own() -> None:
    section = ContainerEnvironment(image="all", cpus=2)
    assert section.of_task(Task("t", "")) is section
    own = section.of_task(Task("t", "", metadata={SEALED: {"container": {"dockerfile": "there", "memory_mb": 64}}}))
    assert (own.image, own.dockerfile, own.memory_mb, own.cpus) == (None, Path("there"), 64, 2)
    with pytest.raises(ConfigError, match="task t: its container is described wrongly"):
        section.of_task(Task("t", "", metadata={SEALED: {"container": {"memory": 1}}}))
    with pytest.raises(ConfigError, match="task t names no image of its own; give environment"):
        ContainerEnvironment().of_task(Task("t", ""))


# -- without an engine -----------------------------------------------------------------------------------------


@pytest.fixture
def _no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an engine."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(engines, "SOCKETS", {"docker": [str(tmp_path / "d.sock")], "podman": []})


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize(
    ("engine", "says"),
    [("auto", "no engine of containers"), ("docker", "no socket of Docker"), ("podman", "no podman")],
)
def test_an_error_says_what_to_install(engine: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment.engine: there is {says} here; install podman .* DOCKER_HOST"):
        find_engine(engine)


def test_docker_host_and_urls_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    assert find_engine("auto") == "tcp://elsewhere:2375"
    assert find_engine("unix:///my.sock") == "unix:///my.sock"


def test_a_socket_that_does_not_answer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    with pytest.raises(ConfigError, match=r"unix:///.*none.sock does not answer: .*; install podman"):
        ContainerEngine(f"unix://{tmp_path}/none.sock")


@pytest.mark.usefixtures("_no_engine")
def test_check_refuses_what_run_would_refuse_and_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("docker")
    path = str(run_file(tmp_path))
    assert main(["check", path]) == 2
    assert "there is no engine of containers here; install podman" in capsys.readouterr().err
    assert main(["run", path, "--out", str(tmp_path / "out")]) == 2
    assert "there is no engine of containers here; install podman" in capsys.readouterr().err
    assert main(["check", path, "--no-data"]) == 0


# -- whose containers they are ---------------------------------------------------------------------------------


def test_a_container_is_abandoned_when_its_process_of_this_machine_has_ended() -> None:
    own = this_process()
    here, _, process = own.rpartition("/")
    pid, _, start = process.partition("-")
    for owner, abandoned in [
        (own, False),
        (f"{here}/{pid}-{int(start) + 1}", True),  # the number of a process is used again
        (f"{here}/{2**22 + 1}-5", True),
        (f"elsewhere/{here.partition('/')[2]}/{pid}-5", False),
    ]:
        assert OwnedContainer("id", owner, "", "running").abandoned is abandoned


# -- results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "details"),
    [
        ("1\n", 1.0, {}),
        (" 0.25 ", 0.25, {}),
        ("+1.", 1.0, {}),
        ("true", 1.0, {}),
        ('{"reward": 0.5, "style": 2}', 0.5, {"style": 2.0}),
        ('{"a": 1, "b": 0}', 0.5, {"a": 1.0, "b": 0.0}),
    ],
)
def test_a_result_is_a_number_or_an_object_of_numbers(text: str, value: float, details: dict[str, float]) -> None:
    score = score_of(text)
    assert (score.value, score.details, score.outcome) == (value, details, "ok")


@pytest.mark.parametrize("text", ["", "passed", "nan", "inf", "[1]", '{"reward": "1"}', "{}", '{"reward": NaN}', "1 2"])
def test_what_is_no_number_earns_nothing(text: str) -> None:
    score = score_of(text)
    assert (score.value, score.outcome) == (0.0, NO_RESULT)


@given(st.lists(st.binary(max_size=30)), st.integers(2, 40).map(lambda half: 2 * half))
def test_of_long_output_the_first_and_the_last_half_are_kept(parts: list[bytes], most: int) -> None:
    kept, whole = _Kept(most), b"".join(parts)
    for part in parts:
        kept.add(part)
    if len(whole) <= most:
        assert kept.text() == whole.decode("utf-8", "replace")
    else:
        between = f"\n... {len(whole) - most} bytes left out ...\n".encode()
        assert kept.text() == (whole[: most // 2] + between + whole[-most // 2 :]).decode("utf-8", "replace")


# -- archives --------------------------------------------------------------------------------------------------


def test_a_folder_is_packed_for_root_and_without_devices(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.sh").write_text("echo a")
    (tmp_path / "in/a.sh").chmod(0o755)
    (tmp_path / "in/link").symlink_to("a.sh")
    with tarfile.open(fileobj=io.BytesIO(pack({"/tests": tmp_path / "in"}).read())) as packed:
        assert sorted(packed.getnames()) == ["tests", "tests/a.sh", "tests/link"]
        assert {(each.uid, each.gid) for each in packed} == {(0, 0)}
        assert packed.getmember("tests/a.sh").mode & 0o111
    with pytest.raises(ConfigError, match=r"there is no .*nowhere; correct the path"):
        pack({"/x": tmp_path / "nowhere"})


def test_only_a_regular_file_is_unpacked() -> None:
    assert unpack_file(pack_bytes("a", b"text")) == b"text"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert unpack_file(packed.getvalue()) is None


def test_a_digest_is_that_of_names_modes_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    seen = {folder_digest(tmp_path)}
    (tmp_path / "a").write_text("2")
    seen.add(folder_digest(tmp_path))
    (tmp_path / "a").chmod(0o755)
    seen.add(folder_digest(tmp_path))
    (tmp_path / "b").symlink_to("a")
    seen.add(folder_digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "c")
    seen.add(folder_digest(tmp_path))
    assert len(seen) == 5
    assert folder_digest(tmp_path) in seen


# -- patches ---------------------------------------------------------------------------------------------------

TEXT = "one\ntwo\nthree\nfour\n"


def patched(patch: str, text: str = TEXT) -> str:
    [change] = parse_patch(patch)
    return change.apply(text)


@pytest.mark.parametrize(
    "patch",
    [
        "*** Begin Patch\n*** Update File: f\n@@\n two\n-three\n+3\n four\n*** End Patch\n",
        "*** Update File: f\n two\n-three\n+3",
        "--- a/f\n+++ b/f\n@@ -77,3 +77,3 @@\n two\n-three\n+3\n four\n",
        "diff --git a/f b/f\nindex 1..2 100644\n--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@ two\n two\n-three\n+3\n four\n",
        "Here it is:\n*** Update File: f\n@@ two\n-three\n+3\n",
        "*** Update File: f\n@@\n two  \n-  three\n+3\n",
    ],
)
def test_a_patch_of_either_form_finds_its_lines(patch: str) -> None:
    assert patched(patch) in {"one\ntwo\n3\nfour\n", "one\ntwo  \n3\nfour\n"}


def test_hunks_apply_one_after_the_other() -> None:
    text = "a\nx\nb\nx\nc\n"
    assert patched("*** Update File: f\n@@\n b\n-x\n+y\n@@\n-c\n+d\n", text) == "a\nx\nb\ny\nd\n"
    assert patched("*** Update File: f\n@@ b\n+new\n", text) == "a\nx\nb\nnew\nx\nc\n"
    assert patched("*** Update File: f\n+end\n", text) == text + "end\n"


def test_files_are_added_moved_and_deleted() -> None:
    found = parse_patch("*** Add File: a\n+x\n+y\n*** Delete File: b\n*** Update File: c\n*** Move to: d\n@@\n-1\n+2\n")
    assert [(each.kind, each.path, each.target) for each in found] == [
        ("add", "a", "a"), ("delete", "b", "b"), ("update", "c", "d"),
    ]  # fmt: skip
    assert found[0].apply("") == "x\ny\n"
    assert [each.kind for each in parse_patch("--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+x\n")] == ["add"]
    assert [each.kind for each in parse_patch("--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n")] == ["delete"]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("", "names no file"),
        ("-a\n+b\n", "names no file"),
        ("*** Update File: f\n", "f: the patch has no lines for it"),
        ("*** Update File: f\n@@\nwrong\n", "line 3 of the patch begins with none of"),
        ("*** Update File: f\n@@\n-five\n", "f: these lines are not in the file as they are in the patch:\nfive"),
    ],
)
def test_a_patch_that_does_not_fit_says_where(patch: str, says: str) -> None:
    with pytest.raises(PatchError, match=says):
        patched(patch)


lines = st.lists(st.sampled_from(["a", "b", "c", "", "  d", "@@", "- e"]), max_size=12)


@given(lines, lines)
def test_the_diff_of_two_texts_makes_one_of_the_other(old: list[str], new: list[str]) -> None:
    before, after = ("".join(f"{line}\n" for line in each) for each in (old, new))
    diff = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a/f", "b/f", n=len(old)))
    if diff:
        assert patched(diff, before) == after
