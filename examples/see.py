"""Pictures of shapes to count and to locate, and a new vision-language model (LLaVA) that has seen none.

    python examples/see.py        # writes the checkpoint folder models/see

A picture has 4 x 4 cells of 8 x 8 pixels, with circles, squares and crosses of any colour in some of them. Answers are
a number, or the box [left, top, right, bottom] in pixels.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

KINDS = ("circle", "square", "cross")
CELL, SIDE, MOST = 8, 4, 4
_TOKENS = ["<unk>", "<pad>", "<eos>", "<image>", *" 0123456789[],?\nabcdefghijklmnopqrstuvwxyzHW"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{{ '\n' }}"
)


def shapes(size: int, seed: int = 0, blank: bool = False, solved: bool = False) -> Iterator[dict[str, Any]]:
    """Tasks, half of which ask for a number and half for a place.

    Args:
        blank: show empty pictures, so that nothing but guessing is left.
        solved: give the answer as `response`, to imitate.
    """
    generator = random.Random(seed)
    for number in range(size):
        locate = number % 2 == 1
        kind = generator.choice(KINDS)
        count = 1 if locate else generator.randint(1, MOST)
        cells = generator.sample(range(SIDE * SIDE), count + generator.randint(1, MOST))
        others = [each for each in KINDS if each != kind]
        placed = {cell: kind if i < count else generator.choice(others) for i, cell in enumerate(cells)}
        picture = _drawn({} if blank else placed, generator)
        top, left = (CELL * each for each in divmod(cells[0], SIDE))
        box = [left, top, left + CELL, top + CELL]
        answer = box if locate else count
        row = {
            "prompt": f"Where is the {kind}?" if locate else f"How many {kind}s?",
            "images": [picture],
            "answer": answer,
            "rewards": "boxes" if locate else "count",
        }
        yield row | ({"response": str(answer)} if solved else {})


def _drawn(placed: dict[int, str], generator: random.Random) -> bytes:
    """A picture with these kinds in these cells, as PNG."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    draw = ImageDraw.Draw(image)
    for cell, kind in placed.items():
        top, left = (CELL * each for each in divmod(cell, SIDE))
        box = (left + 1, top + 1, left + CELL - 2, top + CELL - 2)
        colour = tuple(generator.randrange(180) for _ in range(3))
        if kind == "circle":
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
    """Write a LLaVA of 0.6M parameters with random weights, one token per character and one per cell of a picture."""
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

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(_TOKENS)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pixels = CELL * SIDE
    text = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=None, eos_token_id=2, pad_token_id=1,
        initializer_range=0.06,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, image_size=pixels,
        patch_size=CELL, projection_dim=64, initializer_range=0.06,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=_TOKENS.index("<image>"), vision_feature_layer=-1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "position_embedding" in name:
            torch.nn.init.normal_(weight, std=0.5)  # places can be told apart from the start
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    size = {"height": pixels, "width": pixels}
    images = LlavaImageProcessorPil(size=size, crop_size=size, image_mean=[1.0] * 3, image_std=[0.5] * 3)  # white: 0
    LlavaProcessor(
        images, tokenizer, patch_size=CELL, vision_feature_select_strategy="default", image_token="<image>",
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
