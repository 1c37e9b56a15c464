"""`python bench/chat_templates/fetch.py`: brings the templates of three PyPI packages into `.venv-templates`.

Fetches each package as one file, of which only the templates and the licence are kept (`make templates-setup`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / ".venv-templates"
#: package: version, folder of its templates, licence, both by the end of the path, and whether the sdist has them.
PACKAGES = {
    "llama-cpp-python": ("0.3.36", "vendor/llama.cpp/models/templates", "vendor/llama.cpp/LICENSE", True),
    "axolotl": ("0.19.0", "axolotl/utils/chat_templates/templates", "licenses/LICENSE", False),
    "xinference": ("4.1.0", "xinference/model/llm/models", "dist-info/licenses/LICENSE", False),
}


def main() -> int:
    """Fetch what is missing or of another version."""
    record = FOLDER / "versions.json"
    wanted = {name: package[0] for name, package in PACKAGES.items()}
    if record.exists() and json.loads(record.read_text()) == wanted:
        return 0
    for name, (version, templates, licence, sdist) in PACKAGES.items():
        into = FOLDER / name
        into.mkdir(parents=True, exist_ok=True)
        for old in into.glob("*.jinja"):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            only = ["--no-binary" if sdist else "--only-binary", name]
            subprocess.run([*command, *only, "--dest", folder, f"{name}=={version}"], check=True)
            (archive,) = Path(folder).iterdir()
            count = 0
            for path, data in _files(archive):
                if path.endswith(licence):
                    (into / "LICENSE").write_bytes(data)
                elif str(Path(path).parent).endswith(templates):
                    for template, text in _templates(Path(path), data):
                        (into / f"{template}.jinja").write_text(text)
                        count += 1
        print(f"{name} {version}: {count} chat templates in {into}")
    record.write_text(json.dumps(wanted) + "\n")
    return 0


def _templates(path: Path, data: bytes) -> Iterator[tuple[str, str]]:
    """Names and texts in a file: one template, or a list of models as JSON, some of which have none."""
    if path.suffix == ".jinja":
        yield path.stem, data.decode()
        return
    for model in json.loads(data):
        if model.get("chat_template"):
            yield model["model_name"], model["chat_template"]


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Files of a wheel or an sdist that can hold templates or the licence, with their paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith((".jinja", ".json", "LICENSE")):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            if member.isfile() and member.name.endswith((".jinja", ".json", "LICENSE")):
                data = sdist.extractfile(member)
                assert data is not None
                yield member.name, data.read()


if __name__ == "__main__":
    sys.exit(main())
