"""Pictures of shapes to count and to locate and of digits to add, and a new vision-language model (LLaVA).

    python examples/see.py        # writes the checkpoint folder models/see, of a model that has seen nothing yet

A picture has 3 x 3 cells of 8 x 8 pixels, with circles, squares and crosses of any colour in some of them, or with two
of the 1,797 handwritten digits of scikit-learn. Answers are a number, the box [left, top, right, bottom] in pixels, or
a sum after its numbers: 7+8=15.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "cross")
CELL, SIDE, MOST = 8, 3, 4
TOKENS = (*map(str, range(19)), "24", *" [],+=?\nabcdefghijklmnopqrstuvwxyzHSW")
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{{ '\n' }}"
)


def questions(
    size: int,
    seed: int = 0,
    kinds: Sequence[str] = ("count", "locate", "add"),
    held_out: bool = False,
    blank: bool = False,
    mistakes: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Tasks about a picture each, of these kinds in turn.

    Args:
        held_out: show digits that other questions do not show.
        blank: show empty pictures, so that nothing but guessing is left.
        mistakes: share of wrong answers in `response`, which stage 1 imitates: one shape is counted twice, a box's top
            is taken for its left, or the carry of a sum is forgotten. None: no `response`.
    """
    generator = random.Random(f"{seed}{' held out' if held_out else ''}")
    for number in range(size):
        kind = kinds[number % len(kinds)]
        cells = generator.sample(range(SIDE * SIDE), 2 * MOST)
        if kind == "add":
            (left, a), (right, b) = (generator.choice(_digits(held_out)) for _ in range(2))
            contents: list[Any] = [left, right]
            cells = [SIDE * generator.randrange(SIDE) + side for side in (0, SIDE - 1)]
            prompt, answer, wrong = "Sum of the digits?", a + b, (a + b) % 10
        else:
            shape = generator.choice(SHAPES)
            count = 1 if kind == "locate" else generator.randint(1, MOST)
            others = [each for each in SHAPES if each != shape]
            contents = [shape] * count + generator.choices(others, k=generator.randint(1, MOST))
            if kind == "count":
                plural = f"{shape}es" if shape == "cross" else f"{shape}s"
                prompt, answer, wrong = f"How many {plural}?", count, count + 1
            else:
                prompt, answer = f"Where is the {shape}?", (box := _box(cells[0]))
                wrong = [box[1], box[0], box[3], box[2]]
        placed = dict(zip(cells, contents, strict=False))
        row = {
            "prompt": prompt,
            "images": [_drawn({} if blank else placed, generator)],
            "answer": answer,
            "rewards": "boxes" if kind == "locate" else "count",
        }
        if mistakes is not None:
            told = json.dumps(wrong if generator.random() < mistakes else answer, separators=(",", ":"))
            row["response"] = f"{a}+{b}={told}" if kind == "add" else told
        yield row


def _box(cell: int) -> list[int]:
    top, left = (CELL * each for each in divmod(cell, SIDE))
    return [left, top, left + CELL, top + CELL]


@cache
def _digits(held_out: bool) -> list[tuple[Any, int]]:
    """Handwritten digits, 8 x 8 levels of grey (0 to 255), and their values."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("handwritten digits need scikit-learn: pip install 'rollmill[examples]'") from error
    found = load_digits()
    pairs = [(255 - each * (255 / 16), int(value)) for each, value in zip(found.images, found.target, strict=True)]
    return pairs[1500:] if held_out else pairs[:1500]


def _drawn(placed: dict[int, Any], generator: random.Random) -> bytes:
    """A picture with these shapes or digits in these cells, as PNG."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    draw = ImageDraw.Draw(image)
    for cell, kind in placed.items():
        top, left = (CELL * each for each in divmod(cell, SIDE))
        box = (left + 1, top + 1, left + CELL - 2, top + CELL - 2)
        colour = tuple(generator.randrange(180) for _ in range(3))
        if not isinstance(kind, str):
            image.paste(Image.fromarray(kind.astype("uint8")), (left, top))
        elif kind == "circle":
            draw.ellipse(box, fill=colour)
        elif kind == "square":
            draw.rectangle(box, outline=colour)
        else:
            draw.line(box, fill=colour)
            draw.line((box[0], box[3], box[2], box[1]), fill=colour)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def write_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write a LLaVA of 0.4M parameters with random weights, one token per number, character and cell of a picture."""
    write_llava(folder, TOKENS, r"\d+|[\s\S]", pixels=CELL * SIDE, patch=CELL, seed=seed)


def write_llava(folder: Path, tokens: Sequence[str], split: str, *, pixels: int, patch: int, seed: int) -> None:
    """Write a small LLaVA with random weights, its tokenizer and its processor.

    Args:
        tokens: what stands for a token each, after the special ones.
        split: regular expression of a token in a text.
        pixels: side of a picture.
        patch: side of the part of a picture that becomes a token.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PreTrainedTokenizerFast,
    )
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    special = ["<unk>", "<pad>", "<eos>", "<image>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *tokens])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = LlamaConfig(
        hidden_size=96, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=None, eos_token_id=2, pad_token_id=1,
        initializer_range=0.06,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, image_size=pixels,
        patch_size=patch, projection_dim=64, initializer_range=0.06,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=special.index("<image>"), vision_feature_layer=-1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "position_embedding" in name:
            torch.nn.init.normal_(weight, std=1.0)  # places can be told apart from the start
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    size = {"height": pixels, "width": pixels}
    images = LlavaImageProcessorPil(size=size, crop_size=size, image_mean=[1.0] * 3, image_std=[0.5] * 3)  # white: 0
    LlavaProcessor(
        images, tokenizer, patch_size=patch, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1, chat_template=_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description="A small vision-language model with random weights.")
    parser.add_argument("--out", type=Path, default=Path("models/see"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
