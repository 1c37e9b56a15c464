"""Pictures by reference: from a row to a task, the content hash, and what goes wrong."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.cli import main
from rollmill.config.taskset import TasksetConfig
from rollmill.data import Taskset, load_taskset
from rollmill.data.images import (
    ImageRef,
    PictureFolder,
    data_url,
    image_refs_of,
    make_image_ref,
    metadata_with_images,
    read_image,
    scaled_url,
)
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
    with pytest.raises(TasksetError, match=r"red\.png has changed since it was first read .*put the old one back"):
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
        ({"image": "data:image/png;base64,AAAA"}, {}, "the image of column image is not an image that can be opened"),
        ({"image": "data:image/png;base64,A"}, {}, "column image has a data URL that is not valid base64"),
        ({"image": "data:text/plain,hello"}, {}, "column image has data:text/plain, not an image as data:image"),
        ({"scan": 3}, {"fields": {"images": "scan"}}, "column scan holds int, not the path of an image, an image"),
        ({}, {"fields": {"images": "scan"}}, r"no column scan .*name another in taskset.fields.images"),
    ],
)
def test_wrong_pictures_are_bad_rows(folder: Path, row: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        load(folder, row, **keys)
    with pytest.raises(TasksetError, match="all 1 rows were skipped"):
        load(folder, row, on_bad_row="skip", **keys)


def test_pictures_inside_the_taskset_are_kept_by_hash(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Parquet and `datasets` hold them, decoded or not, and as data URLs."""
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    content = (folder / "pictures/red.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = Image.open(folder / "pictures/red.png")
    cells: list[Any] = [{"bytes": content, "path": "red.png"}, [{"bytes": content, "path": None}], content, url, image]
    for cell in cells:
        [ref] = image_refs_of(metadata_with_images({"image": cell, "other": 1}, None, folder))
        assert (ref.width, ref.height, ref.media_type) == (40, 20, "image/png")
        with Image.open(io.BytesIO(read_image(ref))) as read:
            assert read.convert("RGB").tobytes() == image.convert("RGB").tobytes()
        assert metadata_with_images({"image": cell}, "", folder) == {"image": cell}
    [found] = (tmp_path / "cache/images").glob(hashlib.sha256(content).hexdigest())
    assert found.read_bytes() == content


def test_parquet_and_folders_of_datasets_hold_pictures(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    content = (folder / "pictures/red.png").read_bytes()
    rows = {"prompt": ["a", "b"], "images": [[content], [content, content]], "answer": ["1", "2"]}
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "folder")
    made.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "folder", tmp_path / "rows.parquet"):
        tasks = load_taskset(TasksetConfig(path=path, chat=True)).tasks
        assert [len(image_refs_of(task.metadata)) for task in tasks] == [1, 2]
        assert {ref.sha256 for task in tasks for ref in image_refs_of(task.metadata)} == {
            hashlib.sha256(content).hexdigest()
        }


def test_messages_have_image_parts(folder: Path) -> None:
    content = (folder / "pictures/red.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    openai = [
        {"type": "text", "text": "first "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "then "},
        {"type": "image_url", "image_url": {"url": "pictures/grey.jpg"}},
    ]
    task = load(folder, {"prompt": [{"role": "user", "content": openai}]}).tasks[0]
    assert task.prompt == [{"role": "user", "content": "first then "}]
    refs = image_refs_of(task.metadata)
    assert [(ref.message, ref.offset, ref.width) for ref in refs] == [(0, 6, 40), (0, 11, 7)]
    parts = [{"type": "image"}, {"type": "text", "text": "?"}, {"type": "image", "text": None}]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    row = {"prompt": chat, "images": ["pictures/red.png", "pictures/grey.jpg"]}
    refs = image_refs_of(load(folder, row, max_pixels=100).tasks[0].metadata)
    assert [(ref.message, ref.offset, ref.width, ref.max_pixels) for ref in refs] == [(1, 0, 40, 100), (1, 1, 7, 100)]
    film = [{"role": "user", "content": [{"type": "video", "video": ["pictures/red.png", "pictures/grey.jpg"]}]}]
    assert [ref.width for ref in image_refs_of(load(folder, {"prompt": film}).tasks[0].metadata)] == [40, 7]
    named = [{"role": "user", "content": [{"type": "image", "path": "pictures/red.png"}]}]
    [ref] = image_refs_of(load(folder, {"prompt": named}, chat=True, system="s").tasks[0].metadata)
    assert (ref.message, ref.offset) == (1, 0)  # after the system message


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"type": "input_audio", "input_audio": {}}], "has a part of type input_audio: audio is not supported"),
        ([{"type": "film", "video": "a.mp4"}], "has a part of type 'film'; text, image, image_url and video are known"),
        ([{"type": "video", "video": "a.mp4"}], "type video that is no list of pictures; give its frames"),
        ([{"type": "image"}], "places for 1 images, and no column holds any"),
        ([{"type": "image", "path": "pictures/none.png"}], "none.png cannot be read"),
        ([{"type": "image", "path": "a.png", "url": "b.png"}], "with path and url; give one of them"),
        ([{"type": "image_url", "image_url": {"detail": "low"}}], "image_url without url"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "rollmill downloads nothing"),
        ([{"type": "text"}], "has a part of type text without text"),
        ([{"text": "?"}], "has a part without a type"),
        ([{"type": "text", "text": "?", "cache": 1}], "type text with cache, which is not known"),
    ],
)
def test_wrong_parts_are_bad_rows(folder: Path, parts: list[Any], message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        load(folder, {"prompt": [{"role": "user", "content": parts}]})


def test_an_oversized_picture_is_a_bad_row(folder: Path) -> None:
    with (folder / "big.png").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(TasksetError, match=r"rows\.jsonl:1: .*big\.png has 65 MiB, and 64 MiB are read at most"):
        load(folder, {"image": "big.png"})
    with pytest.raises(ValueError, match="the image of column image has 65 MiB"):
        metadata_with_images({"image": bytes(65 << 20)}, None, folder)


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


def test_threads_keep_pictures_at_once(tmp_path: Path) -> None:
    """The same ones and new ones, while the oldest are removed."""
    folder = PictureFolder(tmp_path / "kept", most_bytes=3000)

    def keep(number: int) -> ImageRef:
        return folder.keep(Image.new("RGB", (8, 8), (number // 4 % 256, 0, 0)), "a part")

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(keep, range(400)))
    assert len({each.sha256 for each in found}) == 100
    assert sum(each.stat().st_size for each in folder.path.iterdir()) <= 3000 + 3000 // 8  # type: ignore[union-attr]
    assert all(re.fullmatch("[0-9a-f]{64}", each.name) for each in folder.path.iterdir())  # type: ignore[union-attr]


def test_a_file_that_is_kept_may_change(tmp_path: Path) -> None:
    shown = tmp_path / "screen.png"
    Image.new("RGB", (4, 4), "red").save(shown)
    ref = PictureFolder(tmp_path / "kept").keep(str(shown), "a part")
    content = shown.read_bytes()
    Image.new("RGB", (4, 4), "blue").save(shown)
    assert read_image(ref) == content


def test_a_refused_picture_is_not_stored(tmp_path: Path) -> None:
    def accept(found: ImageRef) -> None:
        raise ValueError(f"{found.media_type} {found.width}x{found.height}")

    with pytest.raises(ValueError, match="image/png 4x5"):
        PictureFolder(tmp_path / "kept").keep(Image.new("RGB", (4, 5)), "a part", accept)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("limits", "format", "size", "media_type"),
    [
        ({}, "PNG", (40, 20), "image/png"),
        ({"max_pixels": 200}, "JPEG", (20, 10), "image/png"),
        ({"min_pixels": 3200}, "PNG", (80, 40), "image/png"),
        ({}, "BMP", (40, 20), "image/png"),
        ({}, "JPEG", (40, 20), "image/jpeg"),
    ],
)
def test_programs_get_pictures_as_the_policy_sees_them(
    tmp_path: Path, limits: dict[str, int], format: str, size: tuple[int, int], media_type: str
) -> None:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "picture", format)
    url = scaled_url(replace(make_image_ref(tmp_path / "picture"), **limits), ["image/png", "image/jpeg"])
    head, _, data = url.partition(",")
    assert head == f"data:{media_type};base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == size
