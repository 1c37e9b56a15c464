"""Pictures on the report and on the feedback page: thumbnails with the boxes of answers, escaped and bounded."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.feedback_runs import completion, make_run, served

from rollmill.apps.studio.report.pictures import MAX_PICTURES, MAX_SIDE, draw_thumbnails
from rollmill.apps.studio.report.run_report import write_report
from rollmill.cli import main
from rollmill.data.images import make_image_ref
from rollmill.rewards.builtin.boxes import BoxesReward
from rollmill.rewards.builtin.points import PointsReward
from rollmill.trackers import load_experiences
from rollmill.trackers.rollout_log import RolloutLog
from rollmill.types import Completion, Experience, StopReason, Task, Turn

Image = pytest.importorskip("PIL.Image")
HOSTILE = '"/><script>alert(1)</script>'


def picture(path: Path, width: int = 400, height: int = 200) -> dict[str, Any]:
    """Metadata of a picture of noise, which compresses badly."""
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return asdict(make_image_ref(path))


def seeing(images: list[dict[str, Any]], boxes: Any = None, index: int = 0) -> Experience:
    made = completion(3, "see-1", index, "Where is it?", "[40, 20, 80, 60]", float(index))
    made.info |= {"images": images} | ({} if boxes is None else {"boxes": boxes})
    return made


def decoded(data: str) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))


def test_thumbnails_are_small_and_have_the_boxes(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png")
    [shown] = draw_thumbnails(seeing([image], [[40, 20, 80, 60], [100, 100, 100, 100]]))
    assert decoded(shown.data).size == (shown.width, shown.height) == (MAX_SIDE, MAX_SIDE // 2)
    assert len(shown.data) < 100_000
    assert [(box.x, box.y, box.width, box.height) for box in shown.boxes] == [(19.2, 9.6, 19.2, 19.2), (48, 48, 0, 0)]
    wrong = [[1, 2, 3], ["a", 0, 1, 1], [float("nan"), 0, 1, 1], HOSTILE, [9e9, 0, 1, 1], [-50, -50, 9999, 9999]]
    [shown] = draw_thumbnails(seeing([image], wrong))
    assert [(box.x, box.y, box.width, box.height) for box in shown.boxes] == [(0, 0, 192, 96)]
    assert len(draw_thumbnails(seeing([image], [[0, 0, 9, 9]] * 500))[0].boxes) == 20
    assert draw_thumbnails(seeing([image], HOSTILE))[0].boxes == ()
    many = draw_thumbnails(seeing([image] * (MAX_PICTURES + 3)))
    assert (len(many), many[-1].note) == (MAX_PICTURES + 1, "3 more")


def later(images: list[dict[str, Any]], index: int) -> Experience:
    """One picture in the prompt, the others after the first turn of two."""
    made = seeing(images, None, index)
    length = len(made.token_ids)
    made.turns = [
        Turn("prompt", 0, 2),
        Turn("assistant", 2, 3),
        Turn("observation", 3, 4),
        Turn("assistant", 4, length),
    ]
    made.info["picture_turns"] = [
        {"start": 0, "text": "a", "images": 1},
        {"start": 3, "text": "b", "images": len(images) - 1},
    ]
    return made


def test_pictures_of_later_turns_say_after_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = picture(tmp_path / "a.png", 20, 20)
    shown = draw_thumbnails(later([image] * (MAX_PICTURES + 2), 0))
    assert [each.turn for each in shown] == [0, *[1] * (MAX_PICTURES + 1)]
    assert shown[-1].note == "1 more"
    for wrong in (HOSTILE, [HOSTILE], [{"start": "x", "images": 1}], [{"start": 1, "images": 10**9}], {}):
        strange = seeing([image])
        strange.info["picture_turns"] = wrong
        assert len(draw_thumbnails(strange)) == 1
    run = make_run(tmp_path / "apples")
    RolloutLog(run / "rollouts").write(3, [later([image] * 2, 0), later([image] * 2, 1)])
    assert "<title>after turn 1</title>" in write_report(run).read_text()
    with served(run) as site, httpx.Client(base_url=site.address, headers={"accept": "text/html"}) as client:
        page = client.get("/group", params={"step": 3, "group": "see-1"})
    assert page.text.count("<image href=") == 3  # the prompt's, and one per answer
    assert page.text.count("<title>after turn 1</title>") == 2
    capsys.readouterr()
    assert main(["show", str(run), "--step", "3", "--task", shown_task(run)]) == 0
    assert capsys.readouterr().out.count("(20 x 20) after turn 1") == 2


def shown_task(run: Path) -> str:
    [task] = {each.task_id for each in load_experiences(run, 3)}
    return task


def test_a_picture_that_is_gone_or_huge_leaves_a_note(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", 20, 20)
    (tmp_path / "a.png").unlink()
    assert draw_thumbnails(seeing([image]))[0].note == "the picture is gone, or has changed since"
    assert "100000 x 100000" in draw_thumbnails(seeing([image | {"width": 100_000, "height": 100_000}]))[0].note
    assert draw_thumbnails(seeing([{"path": "/etc/passwd"}])) == []


def test_rewards_say_where_the_answer_points() -> None:
    def score(scorer: Any, text: str, answer: Any) -> Any:
        task = Task("t", "?", answer=answer, metadata={"image_size": [200, 100]})
        none = np.zeros(0, np.int32)
        end = Completion(none, none, none.astype(np.float32), none, none.astype(np.float32), text, StopReason.EOS, 0, 0)
        return asyncio.run(scorer.score(task, end))

    found = score(BoxesReward(name="boxes", coordinates="unit"), "[0.1, 0.2, 0.5, 0.6]", [[0, 0, 1, 1]])
    assert found.boxes == ((20.0, 20.0, 100.0, 60.0),)
    points = score(PointsReward(name="points", tolerance=5), "(3, 4)", [[3, 4]])
    assert points.boxes == ((3.0, 4.0, 3.0, 4.0),)


def test_report_page_and_show_have_the_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "apples")
    image = picture(tmp_path / "a.png") | {"media_type": HOSTILE}
    shown = [seeing([image], [[40, 20, 80, 60]], 0), seeing([image], [[0, 0, 10, 10]], 1)]
    RolloutLog(run / "rollouts").write(3, shown)
    report = write_report(run).read_text()
    assert '<image href="data:image/' in report
    assert '<rect class="box" x="19.2" y="9.6" width="19.2" height="19.2"/>' in report
    assert "img-src data:;" in report
    assert len(report) < 1_000_000
    assert not re.search(r'(src|href)="(?!data:image/|#)', report)
    with served(run) as site, httpx.Client(base_url=site.address, headers={"accept": "text/html"}) as client:
        page = client.get("/group", params={"step": 3, "group": "see-1"})
    assert "img-src 'self' data:" in page.headers["content-security-policy"]
    assert page.text.count("<image href=") == 3  # the prompt's, and one per answer
    assert page.text.count('<rect class="box"') == 2
    assert HOSTILE not in page.text + report
    assert main(["show", str(run), "--step", "3", "--task", "apples"]) == 0
    assert "a.png (400 x 200)" in capsys.readouterr().out
