"""LoRA (arXiv:2106.09685) through peft: adapters in the model, merged copies, and adapter checkpoints.

The model keeps its class. Base weights are frozen, so a reference or a checkpoint needs the adapters only.
"""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.config.model import LoRAConfig
from rollmill.errors import ModelError
from rollmill.models.quantization import full_weight, is_quantized
from rollmill.models.vision import vision_parts

ADAPTER_FOLDER = "adapter"  #: folder inside a checkpoint, in peft's format
BASE_FOLDER = "base_folder"  #: attribute of a quantised model: the folder with its weights as they were
_NAME = "default"


def add_lora(model: Any, config: LoRAConfig, seed: int) -> None:
    """Freezes the model and adds adapters in float32, which initially change nothing: of a vision-language model, to
    its language part.

    Raises:
        ModelError: peft is not installed, no layer matches `targets`, or one of them is an expert, the output layer, or
            a layer whose weight another layer uses, too.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ModelError("model.lora needs the extra `lora`: pip install rollmill[lora]") from error
    owners = _layers_of_weights(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # refused below
        torch.manual_seed(seed)
        try:
            model.add_adapter(
                LoraConfig(
                    r=config.rank,
                    lora_alpha=config.alpha,
                    target_modules=config.targets if isinstance(config.targets, list) else "all-linear",
                    exclude_modules="|".join(rf"{re.escape(part)}\..*" for part in vision_parts(model)) or None,
                    use_rslora=config.rslora,
                    lora_dropout=0.0,
                    task_type="CAUSAL_LM",
                ),
                adapter_name=_NAME,
            )
        except ValueError as error:
            raise ModelError(
                f"model.lora.targets: {error}; use all-linear, or names of the model's linear layers"
            ) from error
    model.merges_adapters = config.merge and not is_quantized(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # made in the type of the layer
            parameter.data = parameter.data.float()
    if any(hasattr(layer, "parameter_name") for layer in adapted_layers(model).values()):  # peft's ParamWrapper
        raise ModelError(
            "model.lora.targets: the experts and the router of this mixture-of-experts model cannot be adapted; name "
            "its other linear layers, for example [q_proj, k_proj, v_proj, o_proj]"
        )
    if hasattr(model.get_output_embeddings(), "get_delta_weight"):
        raise ModelError("model.lora.targets: the output layer cannot be adapted; name other layers")
    for name, layer in adapted_layers(model).items():
        weights = (parameter for parameter in layer.base_layer.parameters(recurse=False))
        others = sorted({other for each in weights for other in owners.get(_address(each), ())} - {name})
        if others:
            raise ModelError(
                f"model.lora.targets: `{name}` has the same weight as `{others[0]}` (tied embeddings, for example), so "
                "merging its adapter would change both; name other layers, or use a checkpoint whose weights are apart"
            )


def _layers_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Names of the layers that use each weight, by its address."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(_address(parameter), []).append(name)
    return found


def _address(weight: Tensor) -> int:
    return weight.data_ptr() or id(weight)  # on the meta device weights have no memory


def has_lora(model: nn.Module) -> bool:
    """True if `add_lora` was called on the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def merges_adapters(model: nn.Module) -> bool:
    """True if an engine decodes with a copy of the weights in which adapters are merged (`model.lora.merge`)."""
    return bool(getattr(model, "merges_adapters", True))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by name; each has a `base_layer`."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}


def copy_without_adapters(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copies the model with `memo`, replacing adapted layers with their base layers."""
    twin: Any = copy.deepcopy(model, memo)
    for name, layer in adapted_layers(twin).items():
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, layer.base_layer)
    if has_lora(twin):
        twin._hf_peft_config_loaded = False
        del twin.peft_config
    plain: nn.Module = twin.eval()
    return plain


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """Returns base weight plus the adapter's product, in the type of the base weight (float32 for a quantised one)."""
    base = full_weight(layer.base_layer)
    return (base + adapter_product(layer)).to(base.dtype)


@torch.no_grad()
def adapter_product(layer: Any) -> Tensor:
    """Returns what an adapter adds to the weight of its layer, in float32."""
    product: Tensor = layer.get_delta_weight(_NAME)
    return product


def copy_with_same_weights(model: nn.Module) -> nn.Module:
    """Copies the modules, but not the weights and buffers: adapters of the copy leave the model as it is."""
    shared: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    twin: nn.Module = copy.deepcopy(model, shared)
    return twin


def merged_model(model: nn.Module) -> nn.Module:
    """Returns an equivalent model without adapters. Weights that are not adapted are shared, not copied."""
    memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    for layer in adapted_layers(model).values():
        memo[id(layer.base_layer.weight)] = nn.Parameter(merged_weight(layer), requires_grad=False)
    return copy_without_adapters(model, memo)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by their checkpoint names, dequantised, with adapters merged."""
    layers, modules = adapted_layers(model), dict(model.named_modules())
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, base, rest = name.rpartition(".base_layer.")
        merged = bool(base) and rest == "weight"
        place, _, kind = name.rpartition(".")
        own = full_weight(modules[place]) if kind == "weight" and not parameter.is_floating_point() else parameter
        found[f"{owner}.{rest}" if base else name] = merged_weight(layers[owner]) if merged else own.detach()
    return found


def save_adapter(model: Any, directory: Path) -> None:
    """Writes the adapters in peft's format. Raises OSError (or safetensors' own error)."""
    model.save_pretrained(directory)


def load_adapter(model: Any, directory: Path) -> None:
    """Loads the weights that `save_adapter` wrote into the adapters.

    Raises:
        ModelError: a file is missing or damaged, or was written with another rank or other layers.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    try:
        read = load_peft_weights(str(directory), device="cpu")
    except Exception as error:  # peft and safetensors raise errors of their own
        raise ModelError(f"{directory}: the adapter cannot be read: {error}") from error
    weights = {name.removeprefix("base_model.model."): weight for name, weight in read.items()}
    mine = get_peft_model_state_dict(model, adapter_name=_NAME)
    strange = sorted(k for k in mine.keys() | weights.keys() if _shape(mine.get(k)) != _shape(weights.get(k)))
    if strange:
        raise ModelError(f"{directory}: the adapter is of another model.lora: {strange[0]} does not fit")
    set_peft_model_state_dict(model, weights, _NAME)


def _shape(weight: Tensor | None) -> Any:
    return None if weight is None else weight.shape
