"""Pictures by reference: from a row to a task, the content hash, and what goes wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.cli import main
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.data.images import ImageRef, data_url, image_refs_of, make_image_ref, metadata_with_images, read_image
from rollmill.errors import ConfigError, TasksetError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 20), "red").save(tmp_path / "pictures/red.png")
    Image.new("L", (7, 9), 3).save(tmp_path / "pictures/grey.jpg")
    (tmp_path / "pictures/text.png").write_text("not a picture")
    return tmp_path


def load(folder: Path, *rows: dict[str, Any], **keys: Any) -> Taskset:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": "?"} | row) + "\n" for row in rows))
    return load_taskset(TasksetConfig.model_validate({"path": folder / "rows.jsonl", **keys}))


def test_a_row_names_pictures_relative_to_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    tasks = load(
        folder,
        {"image": "pictures/red.png", "other": 1},
        {"images": ["pictures/red.png", str(folder / "pictures/grey.jpg")]},
        {"image": {"path": "pictures/grey.jpg", "bytes": None}},
        {"image": ""},
        {"images": []},
        {"image": {"height": 3}},
        {},
    ).tasks
    found = [image_refs_of(task.metadata) for task in tasks]
    assert [[(ref.media_type, ref.width, ref.height) for ref in refs] for refs in found] == [
        [("image/png", 40, 20)],
        [("image/png", 40, 20), ("image/jpeg", 7, 9)],
        [("image/jpeg", 7, 9)],
        [],
        [],
        [],
        [],
    ]
    content = (folder / "pictures/red.png").read_bytes()
    assert found[0][0].sha256 == hashlib.sha256(content).hexdigest()
    assert (found[0][0].size, read_image(found[0][0])) == (len(content), content)
    assert tasks[0].metadata.keys() == {"images", "other"}
    assert tasks[5].metadata == {"image": {"height": 3}}  # another kind of column stays as it is


def test_metadata_holds_references_only(folder: Path) -> None:
    metadata = load(folder, {"image": "pictures/red.png"}).tasks[0].metadata
    assert json.loads(json.dumps(metadata)) == metadata
    assert len(json.dumps(metadata)) < 400
    assert image_refs_of(metadata) == [ImageRef(**metadata["images"][0])]
    assert image_refs_of({"images": ["a.png", {"sha256": "x"}]}) == image_refs_of({"images": 3}) == []


def test_a_picture_that_changed_is_an_error(folder: Path) -> None:
    (ref,) = image_refs_of(load(folder, {"image": "pictures/red.png"}).tasks[0].metadata)
    url = data_url(ref)
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == read_image(ref)
    Image.new("RGB", (40, 20), "blue").save(folder / "pictures/red.png")
    with pytest.raises(TasksetError, match=r"red\.png has changed since the taskset was loaded .*put the old one back"):
        read_image(ref)
    (folder / "pictures/red.png").unlink()
    with pytest.raises(TasksetError, match=r"red\.png cannot be read: No such file or directory; put it back"):
        data_url(ref)


def test_the_fingerprint_of_a_taskset_sees_its_pictures(folder: Path) -> None:
    before = load(folder, {"image": "pictures/red.png"}).fingerprint()
    assert load(folder, {"image": "pictures/red.png"}).fingerprint() == before
    Image.new("RGB", (40, 20), "blue").save(folder / "pictures/red.png")
    assert load(folder, {"image": "pictures/red.png"}).fingerprint() != before


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"image": "pictures/blue.png"}, {}, "blue.png cannot be read: No such file or directory"),
        ({"image": "pictures"}, {}, "pictures cannot be read: Is a directory"),
        ({"image": "pictures/text.png"}, {}, "text.png is not an image that can be opened"),
        (
            {"image": "https://example.org/a.png"},
            {},
            "downloads nothing, so give the path of a file; taskset.fields.images names another column, or '' for none",
        ),
        ({"image": "data:image/png;base64,AAAA"}, {}, "rollmill downloads nothing"),
        ({"scan": 3}, {"fields": {"images": "scan"}}, "column scan holds int, not the path of an image"),
        ({}, {"fields": {"images": "scan"}}, r"no column scan .*name another in taskset.fields.images"),
    ],
)
def test_wrong_pictures_are_bad_rows(folder: Path, row: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        load(folder, row, **keys)
    with pytest.raises(TasksetError, match="all 1 rows were skipped"):
        load(folder, row, on_bad_row="skip", **keys)


def test_pictures_inside_the_taskset_are_refused(folder: Path) -> None:
    """As `datasets` saves them: a taskset keeps references only, and a judge would otherwise see no picture."""
    content = (folder / "pictures/red.png").read_bytes()
    image = Image.open(folder / "pictures/red.png")
    for cell in ({"bytes": content, "path": "red.png"}, [{"bytes": content, "path": None}], image):
        message = "column image holds images, not their paths; save them as files"
        with pytest.raises(ValueError, match=message):
            metadata_with_images({"image": cell}, None, folder)
        assert metadata_with_images({"image": cell}, "", folder) == {"image": cell}


def test_the_column_may_have_another_name_or_be_left_alone(folder: Path) -> None:
    named = load(folder, {"scan": "pictures/red.png", "image": "x"}, fields={"images": "scan"}).tasks[0]
    assert [ref.width for ref in image_refs_of(named.metadata)] == [40]
    assert named.metadata["image"] == "x"
    left = load(folder, {"image": "gone.png"}, fields={"images": ""}).tasks[0]
    assert left.metadata == {"image": "gone.png"}


def test_without_pillow_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"need Pillow: pip install 'rollmill\[vision\]'"):
        load(folder, {"image": "pictures/red.png"})
    assert load(folder, {"prompt": "?"}).tasks


def test_a_picture_with_a_huge_header_is_refused(folder: Path) -> None:
    png = bytearray((folder / "pictures/red.png").read_bytes())
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    (folder / "pictures/bomb.png").write_bytes(bytes(png))
    with pytest.raises(ValueError, match=r"bomb\.png is not an image that can be opened"):
        make_image_ref(folder / "pictures/bomb.png")


def test_sizes_of_pictures_reach_rewards_and_grade(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": "[0, 0, 0.5, 1]", "answer": [0, 0, 20, 20], "image": "pictures/red.png"},
        {
            "response": "[0, 0, 0.5, 1]",
            "answer": [0, 0, 0.5, 1],
            "image": "gone.png",
            "vision": {"boxes": {"reference": "unit"}},
        },
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--option", "coordinates=unit", "--option", "reference=pixels"]
    assert main(["grade", "--reward", "boxes", "--input", str(folder / "answers.jsonl"), *options]) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [1.0, 1.0]
