"""Task folders of Harbor: what becomes of them, and which are refused; what earns a reward, in real containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.containers import environment, image_folder, left_over, missing, no_other_containers, rollout

from rollmill.cli import main
from rollmill.config.taskset import TasksetConfig
from rollmill.data import load_taskset
from rollmill.errors import TasksetError
from rollmill.rewards.builtin.container import ContainerReward, GradingSection, run_grading
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.types import SEALED, Task

TOML = """
schema_version = "1.4"
[task]
name = "org/greet"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 90.0
env = { EXPECTED = "hello" }
[agent]
timeout_sec = 60.0
user = "1000"
[environment]
cpus = 1
memory_mb = 128
storage_mb = 64
workdir = "/task"
env = { NAME = "${HARBOR_TEST_NAME:-world}" }
[solution.env]
GREETING = "hello"
"""
TEST = """#!/bin/sh
if [ "$(cat /task/greeting)" = "$EXPECTED $NAME" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = '#!/bin/sh\necho "$GREETING $NAME" > /task/greeting\n'


def task_folder(folder: Path, *, toml: str = TOML, test: str = TEST) -> Path:
    """A task as Harbor's `harbor task init` lays it out."""
    for name, text in {
        "task.toml": toml,
        "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nWrite a greeting to /task/greeting.\n",
        "tests/test.sh": test,
        "solution/solve.sh": SOLVE,
        "environment/Dockerfile": "FROM scratch\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def loaded(folder: Path, **keys: Any) -> list[Task]:
    return load_taskset(TasksetConfig(harbor=folder, **keys)).tasks


@pytest.fixture
def alone() -> Iterator[None]:
    with no_other_containers():
        yield


def test_task_folders_become_tasks_with_what_agents_must_not_see_sealed(tmp_path: Path) -> None:
    for name in ("b", "a"):
        task_folder(tmp_path / name)
    (tmp_path / "readme").mkdir()
    first, second = loaded(tmp_path, chat=True)
    assert (first.id, second.id) == ("a", "b")
    assert first.prompt == [{"role": "user", "content": "Write a greeting to /task/greeting.\n"}]
    assert first.metadata["difficulty"] == "easy"
    sealed = first.metadata[SEALED]
    assert sealed["container"] == {
        "dockerfile": str(tmp_path / "a/environment"), "variables": {"NAME": "world"}, "cpus": 1, "memory_mb": 128,
        "disk_mb": 64, "folder": "/task", "user": "1000",
    }  # fmt: skip
    grading = GradingSection.model_validate(sealed["grading"])
    assert (grading.files, grading.time_limit_s) == ({"/tests": tmp_path / "a/tests"}, 90)
    assert grading.variables == {"EXPECTED": "hello"}
    assert not grading.end_processes
    assert [each.id for each in loaded(tmp_path / "b")] == ["b"]  # a task folder itself


def test_earlier_schemas_and_variables_of_this_process_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARBOR_TEST_NAME", "moon")
    limits = 'memory = "2G"\nstorage = "512M"\nallow_internet = false\nenv = { A = "${HARBOR_TEST_NAME}" }\n'
    task_folder(tmp_path / "old", toml=f'version = "1.0"\n[environment]\ndocker_image = "img"\n{limits}')
    [task] = loaded(tmp_path)
    assert task.metadata[SEALED]["container"] == {
        "image": "img", "variables": {"A": "moon"}, "memory_mb": 2048, "disk_mb": 512, "network": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[[steps]]\nname = 'one'\n", "it has several steps"),
        ("[environment]\nos = 'windows'\n", "it is for Windows"),
        ("[environment]\ngpus = 1\n", "it needs GPUs"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.b']\n", "a list of hosts"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "its verifier runs in a container of its own"),
        ("[environment.healthcheck]\ncommand = 'true'\n", "a health check"),
        ("[[environment.mcp_servers]]\nname = 'x'\n", "MCP servers"),
        ("[verifier]\nenv = { A = '${HARBOR_TEST_NOT_SET}' }\n", "needs the environment variable HARBOR_TEST_NOT_SET"),
        ("environment = 1\n", "environment is no table"),
        ("[environment\n", "Expected"),
    ],
)
def test_a_task_that_one_container_cannot_do_is_named_with_the_reason(tmp_path: Path, toml: str, says: str) -> None:
    task_folder(tmp_path / "good")
    task_folder(tmp_path / "bad", toml=toml)
    with pytest.raises(TasksetError, match=f"(?s)1 of 2 rows cannot become tasks.*bad.*{says}"):
        loaded(tmp_path)
    assert [each.id for each in loaded(tmp_path, on_bad_row="skip")] == ["good"]


def test_a_task_with_several_services_or_without_tests_is_refused(tmp_path: Path) -> None:
    task_folder(tmp_path / "a")
    (tmp_path / "a/environment/docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(TasksetError, match=r"several services \(docker-compose.yaml\)"):
        loaded(tmp_path)
    (tmp_path / "a/environment/docker-compose.yaml").unlink()
    (tmp_path / "a/tests/test.sh").unlink()
    with pytest.raises(TasksetError, match=r"there is no .*test\.sh"):
        loaded(tmp_path)
    (tmp_path / "a/task.toml").unlink()
    with pytest.raises(TasksetError, match="holds no task folders of Harbor"):
        loaded(tmp_path)


@pytest.mark.service
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is an engine")
def test_the_oracle_earns_one_and_an_agent_that_does_nothing_or_cheats_nothing(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    image_folder(task_folder(tmp_path / "greet") / "environment", "RUN chown 1000 /task\n")
    json_test = TEST.replace("echo 1", """echo '{"reward": 1, "lines": 3}'""").replace(".txt", ".json")
    image_folder(task_folder(tmp_path / "json", test=json_test) / "environment", "RUN chown 1000 /task\n")
    tasks = loaded(tmp_path)
    reward = ContainerReward(name="container")

    async def earned(pool: ContainerPool, task: Task, agent: str) -> tuple[Any, dict[str, float]]:
        async with pool.one(rollout(task)) as container:
            assert (await container.exec("ls /tests /solution /logs")).stdout == ""
            if agent == "oracle":
                solution = GradingSection.model_validate(task.metadata[SEALED]["solution"])
                assert (await run_grading(solution, container)).ok
            elif agent:
                await container.exec(agent, user="0")
            score = await reward.score_container(task, container)
            return score.value, score.details

    async def run() -> None:
        pool = ContainerPool(environment(tmp_path, image="of no task"))
        cheats = [
            "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
            "mkdir /tests; echo 'echo 1' > /tests/test.sh",
        ]
        try:
            for task in tasks:
                found = [
                    await earned(pool, task, agent) for agent in ("oracle", "", "echo hello > /task/greeting", *cheats)
                ]
                assert [value for value, _ in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
                assert found[0][1] == ({"lines": 3.0} if task.id == "json" else {})
        finally:
            await pool.close()

    asyncio.run(run())
    assert left_over() == []


@pytest.mark.service
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is an engine")
def test_the_audit_names_tasks_that_nobody_can_solve_and_those_that_everybody_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("docker")
    verdict = "#!/bin/sh\necho {} > /logs/verifier/reward.txt\n"
    for name, test in {"fair": TEST, "hopeless": verdict.format(0), "free": verdict.format(1)}.items():
        image_folder(task_folder(tmp_path / "tasks" / name, test=test) / "environment", "RUN chown 1000 /task\n")
    (tmp_path / "run.yaml").write_text(
        f"""
model: {{new: {{hidden_size: 32, layers: 1, tokenizer: {{kind: char}}}}}}
taskset: {{harbor: {tmp_path}/tasks}}
workflow: react
environment: {{name: container, engine: podman}}
tools: [shell]
rewards: [{{name: container}}]
"""
    )
    assert main(["audit", str(tmp_path / "run.yaml"), "--json"]) == 1
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["container_oracle"]["tasks"] == ["hopeless"]
    assert found["container_empty"]["tasks"] == ["free"]
    assert found["container_errors"]["severity"] == "ok"
    assert "oracle" not in found  # there is no text to score
    assert left_over() == []
