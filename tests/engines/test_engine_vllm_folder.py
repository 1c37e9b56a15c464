"""Folders of vLLM engines in shared memory: in use as long as they are locked, and removed when nobody can."""

from __future__ import annotations

from pathlib import Path

from rollmill.engines.vllm.process import make_engine_folder


def test_abandoned_folders_are_removed_and_others_stay(tmp_path: Path) -> None:
    used, lock = make_engine_folder(tmp_path)
    left, other = make_engine_folder(tmp_path)
    assert lock is not None
    assert other is not None
    (left / "weights").write_bytes(b"large")
    (tmp_path / "rollmill-vllm-of-an-older-version").mkdir()
    other.close()  # as the end of its process does
    made, _ = make_engine_folder(tmp_path)
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([used, made, tmp_path / "rollmill-vllm-of-an-older-version"])
    assert used.is_dir()
    lock.close()
