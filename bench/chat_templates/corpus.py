"""Real chat templates of four PyPI packages, read from where they are installed or unpacked; none is in git.

| package | licence | templates |
|---|---|---|
| trl | Apache-2.0 | checkpoints' own, byte by byte, and TRL's `*_training` variants with `{% generation %}` marks |
| llama-cpp-python (its sdist) | MIT | llama.cpp's collection: checkpoints' own; a few which it wrote or repaired |
| axolotl | Apache-2.0 | families missing above, in axolotl's copies |
| xinference | Apache-2.0 | further checkpoints' own, some in an older version, some changed by xinference |

TRL is installed by `make setup`; `make templates-setup` fetches and unpacks the other three.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FETCHED = ROOT / ".venv-templates"
XINFERENCE = "xinference-"
"""What names of xinference's copies begin with, since other packages have some of the same names."""
LICENCES = {"trl": "Apache-2.0", "llama-cpp-python": "MIT", "axolotl": "Apache-2.0", "xinference": "Apache-2.0"}
HOW = {package: "make setup" if package == "trl" else "make templates-setup" for package in LICENCES}

#: Families that neither TRL nor llama.cpp has; axolotl's other templates are those, or its own.
OF_AXOLOTL = (
    "chatml", "deepseek_v2", "exaone", "exaone4", "falcon_h1", "gemma3n", "jamba", "llama4", "mistral_v1",
    "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken", "phi_4", "pixtral",
)  # fmt: skip
#: Checkpoints of xinference whose templates use tools, thoughts or formats that the others lack; the rest is older.
OF_XINFERENCE = (
    *("Baichuan-M2", "DeepSeek-V3.2-Exp", "Deepseek-V3.1", "GLM-4.6", "Hy-MT2-1.8B", "KAT-V1", "Kimi-K2.5"),
    *("MiniMax-M2", "MiniMax-M2.5", "MiniMax-M2.7", "QvQ-72B-Preview", "QwQ-32B", "Qwen3-Coder", "Qwen3-Instruct"),
    *("Qwen3-Next-Thinking", "Qwen3-Omni-Instruct", "Qwen3-Omni-Thinking", "Qwen3-VL-Thinking", "Yi-1.5-chat"),
    *("XiYanSQL-QwenCoder-2504", "deepseek-r1-0528", "deepseek-r1-0528-qwen3", "deepseek-v2.5", "deepseek-v3"),
    *("deepseek-v3-0324", "glm-4.1v-thinking", "glm-4.5", "glm-4.5v", "glm-5.1", "glm-5.2", "glm-5.3", "glm4-0414"),
    *(
        "glm4-chat",
        "gpt-oss",
        "internlm3-instruct",
        "llama-3.2-vision-instruct",
        "minicpm5-2b",
        "mistral-instruct-v0.3",
    ),
    *("mistral-large-instruct", "moonlight-16b-a3b-instruct", "phi-3-mini-128k-instruct", "qwen1.5-chat"),
    *("qwen2.5-instruct-1m", "qwen2.5-omni", "qwen3", "qwen3.8-max", "seed-oss", "skywork-or1"),
)
#: Names that stand for no checkpoint: written by llama.cpp for formats that it supports otherwise.
NOT_REAL = ("llama-cpp-deepseek-r1", "llama-cpp-rwkv-world")
#: The checkpoint has no Jinja template, or one with errors: llama.cpp wrote this one.
WRITTEN_BY_LLAMA_CPP = (
    "Apriel-1.6-15b-Thinker-fixed", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4",
    "deepseek-ai-DeepSeek-V4-Flash-0731", "google-gemma-4-31B-it-interleaved",
)  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """One template and its origin.

    Attributes:
        training: TRL's variant with `{% generation %}` marks; None where there is none.
        note: a deviation from the checkpoint's own template.
    """

    name: str
    text: str
    package: str
    version: str
    training: str | None = None
    note: str = ""

    @property
    def licence(self) -> str:
        return LICENCES[self.package]


@cache
def templates() -> tuple[ChatTemplate, ...]:
    """All templates of the packages that are there, each text once, TRL's first."""
    found: dict[str, ChatTemplate] = {}
    for template in (*_of_trl(), *_of_llama_cpp(), *_of_axolotl(), *_of_xinference()):
        found.setdefault(template.text.strip(), template)
    return tuple(found.values())


def template(name: str) -> ChatTemplate:
    """One template by name. Raises KeyError."""
    return {each.name: each for each in templates()}[name]


def absent() -> dict[str, str]:
    """Packages whose templates are not here, each with the command that brings them."""
    return {name: f"run `{how}`" for name, how in HOW.items() if _folder(name) is None}


def _folder(package: str) -> Path | None:
    if package == "trl":
        spec = importlib.util.find_spec("trl")
        folder = Path(spec.origin).parent / "chat_templates" if spec is not None and spec.origin else FETCHED / "none"
    else:
        folder = FETCHED / package
    return folder if folder.is_dir() else None


def _version(package: str) -> str:
    if package == "trl":
        return version("trl")
    found: str = json.loads((FETCHED / "versions.json").read_text())[package]
    return found


def _of_trl() -> list[ChatTemplate]:
    folder = _folder("trl")
    if folder is None:
        return []
    found = []
    for file in sorted(folder.glob("*.jinja")):
        if not file.stem.endswith("_training"):
            marked = folder / f"{file.stem}_training.jinja"
            training = marked.read_text() if marked.exists() else None
            found.append(ChatTemplate(file.stem, file.read_text(), "trl", _version("trl"), training))
    return found


def _of_llama_cpp() -> list[ChatTemplate]:
    folder = _folder("llama-cpp-python")
    files = [] if folder is None else sorted(folder.glob("*.jinja"))
    return [
        ChatTemplate(
            file.stem,
            file.read_text(),
            "llama-cpp-python",
            _version("llama-cpp-python"),
            note="written or repaired by llama.cpp" if file.stem in WRITTEN_BY_LLAMA_CPP else "",
        )
        for file in files
        if file.stem not in NOT_REAL
    ]


def _of_axolotl() -> list[ChatTemplate]:
    folder = _folder("axolotl")
    files = [] if folder is None else [folder / f"{name}.jinja" for name in OF_AXOLOTL]
    return [
        ChatTemplate(file.stem, file.read_text(), "axolotl", _version("axolotl"), note="axolotl's copy")
        for file in files
    ]


def _of_xinference() -> list[ChatTemplate]:
    folder = _folder("xinference")
    files = [] if folder is None else [folder / f"{name}.jinja" for name in OF_XINFERENCE]
    return [
        ChatTemplate(
            f"{XINFERENCE}{file.stem}", file.read_text(), "xinference", _version("xinference"), note="xinference's copy"
        )
        for file in files
    ]
