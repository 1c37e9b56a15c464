"""Token tables of the checkpoints' families: which markers are tokens, which of them decoding drops, what ends a turn.

Taken from the checkpoints' `tokenizer_config.json` and `generation_config.json`. Markers of the forms `<|name|>` and
`<｜name｜>` that a template writes are tokens of the checkpoint and need no entry, unless they are in `plain`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.chat_templates.corpus import XINFERENCE


@dataclass(frozen=True)
class Family:
    """Tokens of a family beside those that are found in its templates.

    Attributes:
        names: pattern of the templates' names; the first family that matches counts.
        eos: `eos_token` of the tokenizer, which is not always what ends a turn.
        ends: token texts of `eos_token_id` in the generation config.
        special: further control tokens, which decoding drops (`skip_special_tokens`).
        plain: further tokens which decoding keeps: `special: false` in the checkpoint.
        text: markers of the two forms above that are ordinary text in this family.
    """

    names: str
    bos: str | None
    eos: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


def tags(*names: str) -> tuple[str, ...]:
    """Opening and closing tags."""
    return tuple(tag for name in names for tag in (f"<{name}>", f"</{name}>"))


THINK = tags("think")
HERMES = tags("tool_call", "tool_response", "think")
GLM = (*HERMES, *tags("arg_key", "arg_value"))
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MISTRAL = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
)  # fmt: skip
TEKKEN_7 = (
    *MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip
DEEPSEEK = (
    *THINK,
    *(f"<｜tool▁{name}▁{end}｜>" for name in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    *("<｜tool▁sep｜>", "<｜User｜>", "<｜Assistant｜>"),
)
DEEPSEEK_TASKS = ("action", "query", "authority", "domain", "title", "read_url")
COHERE_MARKS = tuple(
    f"<|{end}_{name}|>"
    for name in ("THINKING", "RESPONSE", "ACTION", "TOOL_RESULT", "TEXT")
    for end in ("START", "END")
)  # fmt: skip
GEMMA_4 = (
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<image|>", "<|audio>", "<audio|>",
)  # fmt: skip
LLAMA_3_MORE = ("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>")
END_OF_SENTENCE, BEGIN_OF_SENTENCE = "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
END_OF_TURN, TURN = "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)

FAMILIES = (
    Family(
        "gemma4|diffusion_gemma|google-gemma-4", "<bos>", "<eos>", ("<eos>", "<turn|>", "<|tool_response>"), GEMMA_4
    ),
    Family(
        "gemma",
        "<bos>",
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        ("<start_of_turn>", "<start_of_image>", "<image_soft_token>", "<audio_soft_token>"),
    ),
    Family("cohere2|Cohere2MoE|.*command-r7b", "<BOS_TOKEN>", END_OF_TURN, TURN, plain=COHERE_MARKS),
    Family("cohere|CohereForAI", "<BOS_TOKEN>", END_OF_TURN, TURN),
    Family(
        ".*DeepSeek-V4",
        *(BEGIN_OF_SENTENCE, END_OF_SENTENCE, (END_OF_SENTENCE,)),
        tuple(f"<｜{name}｜>" for name in ("latest_reminder", *DEEPSEEK_TASKS)),
        plain=(*DEEPSEEK, "｜DSML｜"),
    ),
    Family(".*DeepSeek-V3.2", BEGIN_OF_SENTENCE, END_OF_SENTENCE, (END_OF_SENTENCE,), plain=(*DEEPSEEK, "｜DSML｜")),
    Family("[Dd]eep[Ss]eek|skywork", BEGIN_OF_SENTENCE, END_OF_SENTENCE, (END_OF_SENTENCE,), plain=DEEPSEEK),
    Family(
        "glm|GLM",
        None,
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("[gMASK]", "<sop>"),
        GLM,
    ),
    Family(
        "gptoss|gpt-oss",
        "<|startoftext|>",
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|constrain|>",),
    ),
    Family("idefics3", "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<end_of_utterance>"), ("<image>",)),
    Family("smolvlm", "<|im_start|>", "<end_of_utterance>", ("<end_of_utterance>",), ("<image>",)),
    Family("lfm2|LFM2", "<|startoftext|>", "<|im_end|>", ("<|im_end|>",), ("<image>",), THINK),
    Family("llama4", "<|begin_of_text|>", "<|eot|>", ("<|end_of_text|>", "<|eom|>", "<|eot|>")),
    Family(
        r"llama3_[12]|llama-3\.2|meetkai-functionary-medium-v3.1",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        LLAMA_3_MORE,
    ),
    Family(
        "llama3|meetkai|fireworks",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eot_id|>"),
        text=("<|NONE|>",),
    ),
    Family("llava_next|mistral_v1", "<s>", "</s>", ("</s>",), ("<image>",)),
    Family(
        "mistral_v2v3|mistral_v3|pixtral|mistralai-Mistral-Nemo|mistral-(instruct|large)",
        "<s>",
        "</s>",
        ("</s>",),
        (*MISTRAL, "[IMG]"),
    ),
    Family("mistral|Mistral|unsloth-mistral", "<s>", "</s>", ("</s>",), TEKKEN_7),
    Family("muse_glimmer", "<|begin_of_text|>", "<|eot|>", ("<|eot|>", "<|eom|>")),
    Family(
        "NVIDIA-Nemotron-Nano-v2",
        "<s>",
        "<SPECIAL_12>",
        ("</s>", "<SPECIAL_12>"),
        ("<SPECIAL_10>", "<SPECIAL_11>"),
        (*THINK, *tags("TOOLCALL", "AVAILABLE_TOOLS", "TOOL_RESPONSE")),
    ),
    Family("nemotron", "<s>", "<|im_end|>", ("</s>", "<|im_end|>"), plain=HERMES),
    Family("phi3|phi-3", "<s>", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>")),
    Family("phi_4", "<|endoftext|>", "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), plain=THINK),
    Family(
        "qwen2|Qwen-Qwen2|MiMo|chatml",
        None,
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        VISION,
        tags("tool_call"),
    ),
    Family(
        "qwen|Qwen|QwQ|QvQ|KAT|Baichuan-M2|XiYanSQL",
        None,
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        VISION,
        HERMES,
    ),
    Family(
        "exaone4",
        "[BOS]",
        "[|endofturn|]",
        ("[|endofturn|]",),
        ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]"),
        (*THINK, *tags("tool_call", "tool_result", "tool")),
    ),
    Family("exaone", "[BOS]", "[|endofturn|]", ("[|endofturn|]",), ("[|system|]", "[|user|]", "[|assistant|]")),
    Family("falcon_h1", "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<|im_end|>")),
    Family(
        "jamba",
        "<|startoftext|>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|eom|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    ),
    Family("Apertus", "<s>", "<|assistant_end|>", ("<|assistant_end|>",)),
    Family("(unsloth-)?Apriel", "<s>", "<|end|>", ("<|end|>",), plain=tags("thinking", "tool_calls")),
    Family("Bielik", "<s>", "<|im_end|>", ("<|im_end|>", "</s>"), plain=HERMES),
    Family(
        "ByteDance-Seed|seed-oss",
        "<seed:bos>",
        "<seed:eos>",
        ("<seed:eos>",),
        ("<seed:pad>", *tags("seed:think", "seed:tool_call", "seed:cot_budget_reflect")),
    ),
    Family("GigaChat3", "<s>", "</s>", ("</s>", "<|message_sep|>")),
    Family("HuggingFaceTB-SmolLM3", "<|begin_of_text|>", "<|im_end|>", ("<|im_end|>",), plain=HERMES),
    Family(
        "Kimi-K3",
        "[BOS]",
        "[EOS]",
        ("[EOS]", "<|end_of_msg|>"),
        plain=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    Family(
        "Kimi|moonshotai|moonlight",
        "[BOS]",
        "[EOS]",
        ("[EOS]", "<|im_end|>"),
        plain=(
            *THINK,
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
    Family(
        "MiniMax-M1", "<beginning_of_sentence>", "<end_of_sentence>", ("<end_of_sentence>",), ("<begin_of_document>",)
    ),
    Family("MiniMax-M2", "]~!b[", "[e~[", ("[e~[",), ("]~b]",), (*THINK, *tags("minimax:tool_call"))),
    Family("MiniMax-M3", "]~!b[", "[e~[", ("[e~[",), ("]~b]",), (*tags("mm:think"), "]<]minimax[>[")),
    Family(
        "NousResearch", "<|begin_of_text|>", "<|im_end|>", ("<|im_end|>", "<|end_of_text|>"), plain=tags("tool_call")
    ),
    Family("Reka", "<|endoftext|>", "<sep>", ("<sep>", "<|endoftext|>"), plain=HERMES),
    Family("Spark", "<｜start▁of▁sentence｜>", END_OF_SENTENCE, (END_OF_SENTENCE,), plain=GLM),
    Family("StepFun", BEGIN_OF_SENTENCE, "<|im_end|>", ("<|im_end|>", END_OF_SENTENCE), plain=HERMES),
    Family(
        "ibm-granite-granite-3",
        "<|end_of_text|>",
        "<|end_of_text|>",
        ("<|end_of_text|>",),
    ),
    Family("ibm-granite", "<|end_of_text|>", "<|end_of_text|>", ("<|end_of_text|>",), plain=HERMES),
    Family("inclusionai-ling", "<|startoftext|>", "<|role_end|>", ("<|role_end|>", "<|endoftext|>"), tags("role"), GLM),
    Family("openbmb-MiniCPM5|minicpm5", "<s>", "<|im_end|>", ("<|im_end|>", "</s>"), plain=HERMES),
    Family(
        "poolside",
        "〈|EOS|〉",
        "〈|EOS|〉",
        ("〈|EOS|〉", "</assistant>"),
        tags("system", "user", "assistant"),
        GLM,
    ),
    Family(
        "tencent-Hy3",
        "<｜hy_begin_of_sentence:opensource｜>",
        "<｜hy_eos:opensource｜>",
        ("<｜hy_eos:opensource｜>",),
        ("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>"),
        (*(tag.replace(">", ":opensource>") for tag in (*GLM, *tags("tool_calls", "tool_responses"), "<tool_sep>")),),
    ),
    Family("Hy-MT2", "<｜hy_begin▁of▁sentence｜>", "<｜hy_place▁holder▁no▁2｜>", ("<｜hy_place▁holder▁no▁2｜>",)),
    Family(
        "inkling",
        None,
        "<|content_model_end_sampling|>",
        ("<|content_model_end_sampling|>", "<|endoftext|>"),
        (
            *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
            *(f"<|content_{kind}|>" for kind in ("text", "thinking", "image", "audio_input", "xml")),
            *(f"<|content_invoke_tool_{kind}|>" for kind in ("json", "text")),
            *("<|end_message|>", "<|audio_end|>", "<|unused_200053|>", "<|unused_200054|>"),
        ),
        text=("<|message_{{ role }}|>", "<|content_{{ kind }}|>"),
    ),
    Family("internlm3", "<s>", "</s>", ("</s>", "<|im_end|>")),
    Family("Yi-1.5", "<|startoftext|>", "<|im_end|>", ("<|im_end|>",)),
    Family("upstage-Solar", "<|startoftext|>", "<|end|>", ("<|end|>", "<|calls|>", "<|endoftext|>")),
)

_MARKERS = re.compile(r"<\|[^|<>\n\"'+{} ]{1,40}\|>|<｜[^｜<>\n{}]{1,40}｜>|<end_of_utterance>|<end_of_turn>")


def family(name: str) -> Family:
    """The family of a template. Raises KeyError."""
    for each in FAMILIES:
        if re.match(each.names, name.removeprefix(XINFERENCE)):
            return each
    raise KeyError(name)


def added_tokens(family: Family, template: str) -> tuple[list[str], list[str]]:
    """Control tokens, which decoding drops, and the other added tokens of the checkpoint with this template."""
    found = {*_MARKERS.findall(template), *family.special, *family.ends, family.eos, *filter(None, [family.bos])}
    plain = set(family.plain)
    return sorted(found - plain - set(family.text)), sorted(plain - set(family.ends))
