"""Containers of rollouts on a real engine: limits, isolation, files, tools, grading, and what is left in the end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.containers import environment, image_folder, in_container, left_over, missing, no_other_containers, rollout
from support.scripted import Scripted
from support.tiny import tiny_run
from support.toys import toy_tokenizer
from support.waiting import wait_until

import rollmill
from rollmill.cli import main
from rollmill.config.rewards import RewardManagerConfig
from rollmill.config.rollout import RolloutConfig, SamplingConfig
from rollmill.errors import ConfigError, EpisodeError
from rollmill.plugins import call_hook
from rollmill.rewards import build_reward_manager
from rollmill.rewards.base import TIMEOUT
from rollmill.rewards.builtin.container import NO_RESULT, ContainerReward
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.containers import Container
from rollmill.rollout.containers.engine import ContainerEngine
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.rollout.tools.builtin.files import ApplyPatchTool, ReadFileTool, WriteFileTool
from rollmill.rollout.tools.builtin.shell import ShellTool
from rollmill.rollout.tools.pool import ToolPool
from rollmill.rollout.workflows.program import ProgramWorkflow
from rollmill.rollout.workflows.tools import ToolWorkflow
from rollmill.types import Experience, Task

pytestmark = [
    pytest.mark.service,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is an engine"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("docker")
    with no_other_containers():
        yield image_folder(tmp_path_factory.mktemp("image"))


@pytest.fixture(autouse=True)
def _nothing_is_left(image: Path) -> Any:
    yield
    assert left_over() == []


# -- commands --------------------------------------------------------------------------------------------------


def test_a_command_gives_its_code_and_its_output(image: Path) -> None:
    section = environment(image, variables={"A": "of all"}, folder="/tmp")

    async def test(container: Container) -> None:
        found = await container.exec("echo out; echo err >&2; pwd; echo $A $B; exit 3", variables={"B": "own"})
        assert (found.code, found.stdout, found.ok) == (3, "out\n/tmp\nof all own\n", False)
        assert sorted(found.output.splitlines()) == sorted([*found.stdout.splitlines(), "err"])
        assert (await container.exec(["echo", "$A", "a b"], folder="/")).stdout == "$A a b\n"
        assert (await container.exec("id -u", user="7")).stdout == "7\n"
        assert (await container.exec("cat; echo end", stdin=b"in")).stdout == "inend\n"
        long = await container.exec("yes | head -c 1000000", most_output=10)
        assert long.stdout == "y\ny\ny\n... 999990 bytes left out ...\n\ny\ny\n"
        assert (await container.exec("no-such-program")).code == 127

    in_container(section, test)


def test_a_time_limit_kills_all_that_a_command_has_started_and_nothing_else(image: Path) -> None:
    async def test(container: Container) -> None:
        assert (await container.exec("sleep 1001 &")).ok
        await asyncio.sleep(1.5)
        hidden = "(setsid env -i sleep 1002 &); sh -c 'sleep 1003 & sleep 1004' & trap '' TERM INT HUP; sleep 1005"
        found = await container.exec(hidden, time_limit_s=1)
        assert found.code is None
        assert found.reason == "it was still running after 1 s, and was killed"
        left = (await container.exec("ps -o args")).stdout
        assert "sleep 1001" in left
        assert not any(f"sleep 100{number}" in left for number in range(2, 6))

    in_container(environment(image), test)


def test_a_fork_bomb_ends_at_the_limit_and_the_container_can_be_used_again(image: Path) -> None:
    async def test(container: Container) -> None:
        await container.write("/task/kept", b"1")
        found = await container.exec("f() { f | f & }; f; while true; do f; done", time_limit_s=3)
        assert found.code is None or "can't fork" in found.output
        assert (await container.exec("cat /task/kept")).stdout == "1"
        wait = "for i in 1 2 3 4 5 6 7 8 9; do n=$(ps | wc -l); [ $n -lt 12 ] && break; sleep 1; done; echo $n"
        assert int((await container.exec(wait)).stdout) < 12

    in_container(environment(image, pids=32), test)


def test_memory_disk_and_network_are_limited(image: Path) -> None:
    async def test(container: Container) -> None:
        killed = await container.exec("x=$(head -c 200000000 /dev/zero | tr '\\0' a); echo ${#x}")
        assert killed.code != 0
        assert "200000000" not in killed.stdout
        assert (await container.exec("echo alive")).stdout == "alive\n"
        await container.exec("kill -9 -1", user="0")  # also what keeps it running
        assert (await container.exec("echo alive")).stdout == "alive\n"
        await container.exec("head -c 60000000 /dev/zero > /tmp/large")
        assert int((await container.exec("wc -c < /tmp/large")).stdout) <= 20 << 20
        many = "i=0; while true; do head -c 5000000 /dev/zero > /tmp/$i; i=$((i+1)); sleep .1; done"
        found = await container.exec(many, time_limit_s=60)
        assert found.code is None or "No space left" in found.output
        shown = (await container.exec("ip -o link | wc -l; cat /proc/net/route | wc -l")).stdout
        assert shown.split() == ["1", "1"]  # the loopback device, and the header of a table without routes

    in_container(environment(image, memory_mb=64, disk_mb=20), test)


def test_a_container_ends_by_itself_after_its_lifetime(image: Path) -> None:
    async def test(container: Container) -> None:
        await asyncio.sleep(3)
        with pytest.raises(EpisodeError, match="environment `container`: a command cannot be run"):
            await container.exec("true")

    in_container(environment(image, lifetime_s=1), test)


# -- isolation and reset ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [0, 2])
def test_rollouts_see_nothing_of_each_other_and_each_begins_afresh(image: Path, warm: int) -> None:
    async def run() -> None:
        pool = ContainerPool(environment(image, warm=warm))

        async def episode(number: int) -> None:
            async with pool.one(rollout(number=number)) as container:
                assert (
                    await container.exec("find /task /tmp -type f | wc -l; ps | grep -c slee[p]")
                ).stdout == "0\n2\n"
                await container.exec(f"touch /task/{number} /tmp/{number} /bin/new; rm /bin/wc; sleep 1000 &")
                await asyncio.sleep(0.5)
                assert (await container.exec("ls /task")).stdout == f"{number}\n"

        try:
            for first in range(0, 6, 3):
                await asyncio.gather(*(episode(number) for number in range(first, first + 3)))
            assert pool.metrics()["containers/started"] == 6
        finally:
            await pool.close()

    asyncio.run(run())


def test_rollouts_start_from_a_snapshot_of_what_was_prepared(image: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("7")
    keys = {
        "prepare": "cp /srv/data /task/copy; cat /proc/sys/kernel/random/uuid > /task/stamp",
        "files": {"/srv/data": tmp_path / "data"},
    }
    stamps = []

    async def test(container: Container) -> None:
        stamps.append((await container.exec("cat /task/copy /task/stamp; rm /task/*")).stdout)

    for _ in range(2):
        in_container(environment(image, **keys), test)
    assert stamps[0].startswith("7")
    assert stamps[0] == stamps[1]
    with pytest.raises(ConfigError, match=r"environment.prepare: it failed \(3\): what"):
        in_container(environment(image, prepare="echo what; exit 3"), test)


def test_an_image_that_cannot_be_had_is_named(image: Path, tmp_path: Path) -> None:
    async def test(container: Container) -> None:
        raise AssertionError("there is no container")

    with pytest.raises(ConfigError, match="there is no image localhost/none/such:1 here, and it cannot be fetched"):
        in_container(environment(image, image="localhost/none/such:1"), test)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY nothing /\n")
    with pytest.raises(ConfigError, match=r"(?s)environment.dockerfile: .* cannot be built: .*nothing"):
        in_container(environment(image, dockerfile=tmp_path), test)


# -- tools -----------------------------------------------------------------------------------------------------


def test_tools_work_in_the_container_as_its_user(image: Path) -> None:
    sections = [ShellTool(time_limit_s=10, result_chars=200), ReadFileTool(), WriteFileTool(), ApplyPatchTool()]
    pool = ToolPool(sections)

    async def test(container: Container) -> None:
        async with AsyncExitStack() as stack:
            begun = rollout()
            begun.container = container
            tools = await stack.enter_async_context(pool.one(begun))

            async def call(name: str, **arguments: Any) -> str:
                return (await tools.call(name, arguments)).text

            assert await call("shell", command="id -u; pwd") == "1000\n/tmp\n"
            assert await call("shell", command="echo no; exit 4") == "Error: no\nexit code 4"
            assert "it was still running after 10 s, and was killed" in await call("shell", command="echo 1; sleep 99")
            assert "characters left out" in await call("shell", command="yes | head -c 99999")
            assert await call("write_file", path="a/ä.txt", text="one\ntwo\nthree\n") == "wrote a/ä.txt"
            assert await call("read_file", path="/tmp/a/ä.txt", first=2, last=2) == "two\n"
            assert await call("read_file", path="a/ä.txt") == "one\ntwo\nthree\n"
            assert await call("read_file", path="a/ä.txt", first=9) == "Error: a/ä.txt has 3 lines"
            assert "Error: there is no file" in await call("read_file", path="/tmp/a")
            assert "Error" in await call("write_file", path="/bin/new", text="x")  # it belongs to root
            patch = "*** Update File: a/ä.txt\n@@\n-two\n+2\n*** Add File: b.txt\n+new\n"
            assert await call("apply_patch", patch=patch) == "update a/ä.txt\nadd b.txt"
            assert await call("shell", command="cat a/ä.txt b.txt") == "one\n2\nthree\nnew\n"
            wrong = "*** Delete File: b.txt\n*** Update File: a/ä.txt\n@@\n-two\n+2\n"
            assert "these lines are not in the file" in await call("apply_patch", patch=wrong)
            assert await call("shell", command="ls") == "a\nb.txt\n"  # all of a patch or nothing
            moved = "*** Update File: b.txt\n*** Move to: c.txt\n@@\n-new\n+newer\n*** Delete File: a/ä.txt\n"
            assert await call("apply_patch", patch=moved) == "update c.txt\ndelete a/ä.txt"
            assert await call("shell", command="cat c.txt; ls -A a") == "newer\n"
            assert "exists already" in await call("apply_patch", patch="*** Add File: c.txt\n+x\n")

    try:
        in_container(environment(image, user="1000", folder="/tmp"), test)
    finally:
        pool.close()


def test_a_policy_with_tools_is_rewarded_for_what_it_leaves_in_its_container(image: Path) -> None:
    """The workflow `tools` from its first call to its reward."""
    tokenizer = toy_tokenizer()
    chat = ChatRenderer(tokenizer, frozenset([tokenizer.eos_token_id]))
    call = {"tool": "write_file", "args": {"path": "/task/answer", "text": "391"}}
    engine = Scripted(chat, json.dumps(call), "done", "I shall not", "done")
    reward = ContainerReward(name="container", command='test "$(cat /task/answer)" = 391')
    judge = build_reward_manager([reward], RewardManagerConfig(), tokenizer=tokenizer)

    async def run() -> list[float | None]:
        resources = WorkflowResources(judge, environment(image), tools=[WriteFileTool()])
        try:
            workflow = build_workflow(ToolWorkflow(format="json", turns=2), resources)
            assert workflow is not None
            retrying = RetryingWorkflow(workflow, RolloutConfig())
            runner = WorkflowRunner(retrying, engine, chat, judge)  # type: ignore[arg-type]
            found = [
                await runner.group(Task("t", "17*23?\n"), SamplingConfig(), n=1, seed=1, group="g") for _ in range(2)
            ]
            return [each.reward for group in found for each in group[-1:]]
        finally:
            await resources.close()

    assert asyncio.run(run()) == [1.0, 0.0]
    judge.close()


# -- grading ---------------------------------------------------------------------------------------------------


def test_a_command_grades_what_is_left_and_its_files_were_not_there_before(image: Path, tmp_path: Path) -> None:
    (tmp_path / "test.sh").write_text(
        'test "$(cat /task/x)" = 5 && echo "{\\"reward\\": 0.5}" > /out/r.json; echo 0.25'
    )
    files = {"/tests": tmp_path}
    section = environment(image, user="1000", files={"/srv/pid": tmp_path / "test.sh"})
    task = Task("t", "")

    async def test(container: Container) -> None:
        async def score(**keys: Any) -> tuple[Any, str]:
            found = await ContainerReward(name="container", **keys).score_container(task, container)
            return found.value, found.outcome

        assert (await container.exec("ls /tests")).code != 0
        assert await score(command="test -e /nothing") == (0.0, "ok")
        assert await score(command="id -u | grep -q 0") == (1.0, "ok")
        assert await score(command="echo a; echo 0.75", result="last_line") == (0.75, "ok")
        assert await score(command="echo a", result="last_line") == (0.0, NO_RESULT)
        assert await score(command="sleep 9", time_limit_s=1, timeout_reward=-1) == (-1.0, TIMEOUT)
        grade = {"command": "sh /tests/test.sh", "files": files, "result": "/out/no.json or /out/r.json"}
        assert await score(**grade) == (0.0, NO_RESULT)
        await container.exec("echo 5 > /task/x; mkdir -p /tests", user="0")
        await container.exec(
            "echo 'echo 1 > /out/r.json' > /tests/test.sh; mkdir -p /out; echo 1 > /out/r.json", user="0"
        )
        assert await score(**grade) == (0.5, "ok")  # neither the agent's test nor its result counts
        assert await score(**grade | {"result": "last_line"}) == (0.25, "ok")
        await container.exec("(while true; do rm -f /tests/test.sh; done) & sleep 1000 &", user="0")
        assert await score(**grade) == (0.5, "ok")  # programs that the agent has left are ended first
        await container.exec("sleep 1000 &", user="0")
        assert await score(command="ps | grep -q 'sleep 100[0]'", end_processes=False) == (1.0, "ok")
        assert await score(command="ps | grep -q 'sleep 100[0]'") == (0.0, "ok")

    in_container(section, test)


# -- runs ------------------------------------------------------------------------------------------------------

PLUGIN = """
import asyncio, rollmill

@rollmill.workflow
async def agent(task, policy, judge, container, *, seconds: float = 0.0):
    reply = await policy.complete(policy.encode("go", start=True))
    await container.exec("touch /task/done" if reply.completion.seed % 2 else "true")
    await asyncio.sleep(seconds)
    return await judge(reply)
"""


def agent_run(folder: Path, image: Path, *, seconds: float = 0.0, **rollouts: int) -> Path:
    """A run of agents in containers."""
    (folder / "agent.py").write_text(PLUGIN)
    return tiny_run(
        folder,
        stages=None,
        steps=1,
        algorithm="grpo",
        evaluation=None,
        plugins=["agent.py"],
        workflow={"name": "agent", "seconds": seconds},
        environment={"name": "container", "dockerfile": str(image), "engine": "podman", "at_once": 40, "warm": 2},
        rewards=[{"name": "container", "command": "test -e /task/done"}],
        rollout={"max_new_tokens": 2, **rollouts},
    )


def test_a_run_trains_on_agents_in_containers(image: Path, tmp_path: Path) -> None:
    rollmill.run(agent_run(tmp_path, image, batch=2, group_size=4), out=tmp_path / "out")
    rewards = [each.reward for each in rollmill.load_experiences(tmp_path / "out", 1)]
    assert len(rewards) == 8
    assert set(rewards) <= {0.0, 1.0}


ASKS = """wget -q -O /task/reply --header "authorization: Bearer $OPENAI_API_KEY" \\
  --header "content-type: application/json" \\
  --post-data '{"model": "policy", "prompt": "go", "max_tokens": 2}' $OPENAI_BASE_URL/completions
grep -q '"prompt"' && touch /task/done && echo finished
"""
"""A program of a container that has nothing but busybox; its task is on stdin."""
BESIDE = """
import json, os, sys, urllib.request, docker
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = json.dumps({"prompt": "go", "max_tokens": 2}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, head))
container = docker.from_env().containers.get(os.environ["ROLLMILL_CONTAINER"])
assert container.exec_run("touch /task/done").exit_code == 0
assert "sealed" not in json.load(sys.stdin)["metadata"]
"""


@pytest.mark.parametrize("inside", [True, False])
def test_an_unmodified_program_is_recorded_and_graded_in_its_container(
    image: Path, tmp_path: Path, inside: bool
) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    command = ["sh", "-c", ASKS] if inside else ["python", str(tmp_path / "beside.py")]
    path = agent_run(tmp_path, image, batch=1, group_size=2)
    run = yaml.safe_load(path.read_text()) | {"workflow": {"name": "program", "command": command, "inside": inside}}
    run["environment"]["network"] = "host" if inside else "none"
    path.write_text(yaml.safe_dump(run))
    rollmill.run(path, out=tmp_path / "out")
    experiences = rollmill.load_experiences(tmp_path / "out", 1)
    assert [each.reward for each in experiences] == [1.0, 1.0]
    assert all(each.action_tokens for each in experiences)


SHIM = """#!/bin/sh
case $1 in run) echo "$ROLLMILL_CONTAINER" ;; exec) shift; exec "$PYTHON" "$EXEC" "$@" ;; esac
"""
"""The program `docker` of an agent: the container that it asks for is the rollout's, which it need not stop."""
SHIM_EXEC = """
import os, sys, docker
words = sys.argv[1:]
container = docker.from_env().containers.get(os.environ["ROLLMILL_CONTAINER"])
ended = container.exec_run(words[words.index(container.id) + 1 :], workdir=words[words.index("-w") + 1])
sys.stdout.buffer.write(ended.output)
sys.exit(ended.exit_code)
"""


def test_mini_swe_agent_works_unchanged_in_the_rollouts_container(image: Path, tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    for name, text in {"docker": SHIM, "exec.py": SHIM_EXEC}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "docker").chmod(0o755)
    settings = {
        "agent.step_limit": 3,
        "environment.environment_class": "docker",
        "environment.image": "any",
        "environment.executable": tmp_path / "docker",
        "environment.cwd": "/task",
        "environment.interpreter": '["sh","-c"]',
        "model.model_class": "litellm_textbased",
    }
    command = [sys.executable, "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-m", "openai/policy"]
    command += ["-t", "Write 391 to answer.", "-o", str(tmp_path / "trajectory.json"), "-c", "mini_textbased.yaml"]
    command += [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    variables = {
        "PYTHON": sys.executable,
        "EXEC": str(tmp_path / "exec.py"),
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "settings"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }
    block = "I do it.\n\n```mswea_bash_command\n{}\n```"
    tokenizer = toy_tokenizer()
    chat = ChatRenderer(tokenizer, frozenset([tokenizer.eos_token_id]))
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    engine: Any = Scripted(chat, block.format("echo 391 > answer"), block.format(submit))
    reward = ContainerReward(name="container", command='test "$(cat /task/answer)" = 391')
    judge = build_reward_manager([reward], RewardManagerConfig(), tokenizer=tokenizer)

    async def run() -> list[Experience]:
        server = call_hook("policy_server", engine, chat, 1 << 17, 60.0)
        resources = WorkflowResources(judge, environment(image), server)
        try:
            section = ProgramWorkflow(command=command, environment=variables)
            workflow = build_workflow(section, resources)
            assert workflow is not None
            runner = WorkflowRunner(RetryingWorkflow(workflow, RolloutConfig()), engine, chat, judge)
            return await runner.group(Task("t", "go"), SamplingConfig(), n=1, seed=1, group="g")
        finally:
            await resources.close()

    experiences = asyncio.run(run())
    judge.close()
    assert [each.reward for each in experiences] == [1.0] * len(experiences)
    assert sum(int(each.action_mask.sum()) for each in experiences) > 0
    assert len(engine.requests) == 2


@pytest.mark.slow
def test_containers_of_a_run_that_was_killed_are_removed_by_the_next_start(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = agent_run(tmp_path, image, seconds=600, batch=4, group_size=8)
    command = [sys.executable, "-m", "rollmill", "run", str(path), "--out", str(tmp_path / "out")]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
    wait_until(lambda: len(left_over()) >= 34 or run.poll() is not None, 120)  # two are warm
    assert run.poll() is None, (tmp_path / "log").read_text()
    run.send_signal(signal.SIGKILL)  # the process that trains ends with it
    run.wait()
    wait_until(lambda: not list(Path("/tmp").glob("rollmill-podman-*/socket")) or _own_service(), 20)
    assert len(left_over()) >= 34
    assert main(["containers", "list", "--engine", "podman", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["containers"]
    wait_until(lambda: all(each.abandoned for each in ContainerEngine("podman").containers()), 20)
    assert all("rollmill" in each["command"] for each in listed)
    rollmill.run(agent_run(tmp_path, image, batch=1, group_size=2), out=tmp_path / "next")
    assert left_over() == []


def test_containers_and_images_are_listed_and_removed_by_commands(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(container: Container) -> None:
        assert main(["containers", "list", "--engine", "podman"]) == 0
        shown = capsys.readouterr().out
        assert container.id[:12] in shown
        assert "image localhost/rollmill/built:" in shown
        assert main(["containers", "remove", "--engine", "podman"]) == 0
        assert capsys.readouterr().out == "removed 0 containers\n"  # its process goes on
        assert (await container.exec("true")).ok
        assert main(["containers", "remove", "--engine", "podman", "--all"]) == 0
        assert capsys.readouterr().out == "removed 1 containers\n"
        assert container.id[:12] not in left_over()

    in_container(environment(image), test)


def _own_service() -> bool:
    """Whether the only service is that of this process."""
    services = list(Path("/tmp").glob("rollmill-podman-*/socket"))
    return len(services) <= 1


def test_a_service_ends_with_its_process_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    code = "from rollmill.rollout.containers.service import podman_service as s; print(s(None).url(), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "; import time; time.sleep(600)"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip().removeprefix("unix://")).parent
    assert (folder / "socket").exists()
    process.kill()
    process.wait()
    process.stdout.close()
    begun = time.monotonic()
    wait_until(lambda: not folder.exists(), 20)
    assert time.monotonic() - begun < 20
