"""The `ModelShape` of a model of transformers, made from its configuration without weights.

    from partita.predict import shape_of_config
    print(pt.autoplan(shape_of_config("path/to/config.json"), ranks=8, memory="80GB"))

Nothing is downloaded. The model is made on the caller's device (see `ModelShape.make`).
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.tensor_parallel import list_plan

from .strategy import ModelShape, StrategyError, check_argument, refuse_if

TASKS = ("causal-lm", "image-classification")
_CONTEXT = 4096
"""Tokens of a sequence, where the model allows more and nobody says how many."""


def shape_of_config(config: Any, task: str = "causal-lm", *, lora: int | None = None) -> ModelShape:
    """Returns the `ModelShape` of a transformers model, for `pt.autoplan` and `pt.simulate`.

    Args:
        config: a configuration of transformers, the path of a config.json, or that of its folder.
        task: "causal-lm" learns the next token of text; "image-classification" learns a label.
        lora: the rank of adapters of peft at all linear layers but the head. Only these are
            trained. None: all weights are trained.

    Raises:
        StrategyError: transformers or peft is not installed; there is no such file; the model or
            task is unknown.
    """
    check_argument("task", task, task in TASKS, " or ".join(TASKS))
    found = _read_config(config)
    text = found.get_text_config()
    layers = _read_size(text, found, "num_hidden_layers")
    heads = _read_size(text, found, "num_attention_heads")
    make = partial(_make_model, found, task, lora)
    with torch.device("meta"):
        small = make(1, 8)
        plan = _find_tensor_plan(small)
    of_text = task == "causal-lm"
    return ModelShape(
        make=make,
        layers=layers,
        width=_read_size(text, found, "hidden_size"),
        heads=heads if plan else 1,  # without a plan no axis may divide them
        groups=(getattr(text, "num_key_value_heads", None) or heads) if plan else 1,
        context=min(getattr(text, "max_position_embeddings", _CONTEXT), _CONTEXT) if of_text else 1,
        vocab=text.vocab_size if of_text else found.num_labels,
        plan=partial(_get_plan, plan),
        name=found.model_type
        + (f" with LoRA of rank {lora}" if lora else "")
        + f" (weights in {_describe_dtype(small, text)})",
        make_batch=partial(_make_batch if of_text else _make_pictures, found),
        has_sequence=False,
        sums=2 if plan else 0,
    )


def _read_config(config: Any) -> Any:
    try:
        import transformers
    except ImportError:
        raise StrategyError("a model of transformers needs it: pip install transformers") from None
    if isinstance(config, transformers.PretrainedConfig):
        return config
    check_argument("config", config, isinstance(config, (str, Path)), "a path or a configuration")
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    refuse_if(not file.is_file(), f"{file} is not a file: the config.json of a model is needed")
    try:
        return transformers.AutoConfig.from_pretrained(file, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise StrategyError(f"{file} is not a configuration of transformers: {error}") from error


def _read_size(text: Any, whole: Any, name: str) -> int:
    size = getattr(text, name, None) or getattr(whole, name, None)
    refuse_if(not isinstance(size, int), f"the configuration of {whole.model_type} has no {name}")
    return int(size)  # type: ignore[arg-type]


def _describe_dtype(model: nn.Module, text: Any) -> str:
    """Returns the dtype of the largest parameter, and where transformers has found it."""
    dtype = max(model.parameters(), key=Tensor.numel).dtype
    given = getattr(text, "dtype", None) is not None
    why = "the configuration's dtype" if given else "the configuration names no dtype"
    return f"{str(dtype).removeprefix('torch.')}: {why}"


class _Logits(nn.Module):
    """A model of transformers that returns its logits alone.

    Attributes:
        model: the model that transformers makes.
    """

    def __init__(self, model: nn.Module, argument: str):
        super().__init__()
        self.model, self._argument = model, argument

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's layers, which can be recomputed in backward: its longest list of modules."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=len)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**{self._argument: inputs}).logits
        return logits


def _make_model(found: Any, task: str, lora: int | None, layers: int, context: int) -> nn.Module:
    """Returns the model with `layers` blocks. Its weights do not depend on `context`."""
    import transformers

    config = copy.deepcopy(found)
    of_text = task == "causal-lm"
    config = config.get_text_config() if of_text else config
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = (kinds * layers)[:layers]
    auto = transformers.AutoModelForCausalLM
    auto = auto if of_text else transformers.AutoModelForImageClassification
    try:
        model = auto.from_config(config, attn_implementation="sdpa")
    except ValueError:  # the model has only its own attention
        try:
            model = auto.from_config(config)
        except ValueError as error:
            said = f"{found.model_type} is no model for {task}: {str(error).splitlines()[0]}"
            raise StrategyError(said) from error
    model.config.use_cache = False
    if lora is not None:
        model = _add_adapters(model, lora)
    return _Logits(model.train(), "input_ids" if of_text else "pixel_values")


def _add_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise StrategyError("LoRA needs peft: pip install peft") from None
    wanted = peft.LoraConfig(r=rank, target_modules="all-linear")
    adapted: nn.Module = peft.get_peft_model(model, wanted)  # type: ignore[arg-type]
    return adapted


def _find_tensor_plan(model: nn.Module) -> dict[str, Any]:
    """Returns transformers' own plan of tensor parallelism, as `pt.parallelize` takes it.

    It is empty if the model has none, or one with styles that are not placements of parameters.
    """
    inner: Any = model.model
    # The loss takes sharded logits, so the head gathers nothing.
    styles = {
        name: "colwise" if style == "colwise_gather_output" else style
        for name, style in (getattr(inner, "tp_plan", None) or {}).items()
    }
    plan = list_plan(inner, styles, "tp") or {}
    return {f"model.{name}": entry for name, entry in plan.items()}


def _get_plan(plan: dict[str, Any], sequence: bool = False) -> dict[str, Any]:
    return plan


def _make_batch(found: Any, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    vocab = found.get_text_config().vocab_size
    tokens = torch.randint(0, vocab, (sequences, context))
    return tokens, tokens.clone()


def _make_pictures(found: Any, pictures: int, context: int) -> tuple[Tensor, Tensor]:
    size, channels = getattr(found, "image_size", 224), getattr(found, "num_channels", 3)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    labels = torch.randint(0, found.num_labels, (pictures,))
    return torch.randn(pictures, channels, height, width), labels
