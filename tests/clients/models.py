"""The zoo: models that other people wrote, as they come from their packages, and their batches.

Each is made from a tiny configuration, with random weights, and downloads nothing. Rows of a batch
have different lengths and are padded: the mask that a tokenizer gives goes with them, and labels of
padding do not count. Dropout is 0: one process is the ground truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita import Shard
from partita.parallel.plans import column, row, vocabulary

__all__ = ["CLIENTS", "IN_EACH_RUN", "LLAMA_PLAN", "ROWS", "WORDS", "Client"]

ROWS, LENGTH, WORDS = 4, 7, 37

Batch = dict[str, Tensor]


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    """What every model of transformers gives when it is called with labels."""
    return model(**batch).loss


@dataclass(frozen=True)
class Client:
    """A model, its data and its plan.

    Attributes:
        make: a new model, initialised from torch's generator.
        batch: rows of padded data.
        loss: of the model and a batch.
        plan: how tensor parallelism splits it; None: it is not split.
        blocks: the modules that `pt.remat` makes again.
        checkpoints: the model can recompute its blocks by itself.
        asks_for_float32: its code casts to float32, whatever its parameters are.
        inductor: it is compiled by Inductor too.
        captured: the model with what its package offers for one graph, where `make` reads values.
        package: where it comes from.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of_output
    plan: dict[str, Any] | None = None
    blocks: tuple[str, ...] = ()
    checkpoints: bool = True
    asks_for_float32: bool = False
    inductor: bool = False
    captured: Callable[[], nn.Module] | None = None
    package: str = "transformers"


CLIENTS: dict[str, Client] = {}


def _client(name: str, batch: Callable[[int], Batch], **more: Any) -> Callable[..., Any]:
    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CLIENTS[name] = Client(make, batch, **more)
        return make

    return register


# -- batches ---------------------------------------------------------------------------------------


def padded_words(rows: int, left: bool = False) -> Batch:
    """Rows of different lengths, as a tokenizer pads them; no row is all padding."""
    lengths = [LENGTH - 2 * i % (LENGTH - 1) for i in range(rows)]
    places = torch.arange(LENGTH).expand(rows, -1)
    length = torch.tensor(lengths)[:, None]
    mask = (places >= LENGTH - length if left else places < length).long()
    words = torch.randint(1, WORDS, (rows, LENGTH)) * mask
    return {"input_ids": words, "attention_mask": mask}


def causal(rows: int) -> Batch:
    batch = padded_words(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked(rows: int) -> Batch:
    batch = padded_words(rows)
    hidden = (torch.rand(rows, LENGTH) < 0.4) & batch["attention_mask"].bool()
    hidden[0, 0] = True
    return {
        "input_ids": batch["input_ids"].masked_fill(hidden, 1),
        "attention_mask": batch["attention_mask"],
        "labels": batch["input_ids"].masked_fill(~hidden, -100),
    }


def translated(rows: int) -> Batch:
    target = torch.randint(2, WORDS, (rows, 5))
    target[1::2, 3:] = -100
    return {**padded_words(rows), "labels": target}


def spoken(rows: int) -> Batch:
    target = torch.randint(2, WORDS, (rows, 5))
    target[1::2, 3:] = -100
    return {"input_features": torch.randn(rows, 8, 12), "labels": target}


def pictures(rows: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 3, 8, 8),
        "labels": torch.randint(0, 4, (rows,)),
    }


# -- language models -------------------------------------------------------------------------------

LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LLAMA_PLAN = {
    **column("*.self_attn.[qkv]_proj", "*.mlp.gate_proj", "*.mlp.up_proj"),
    **row("*.self_attn.o_proj", "*.mlp.down_proj"),
    **vocabulary("model.embed_tokens", "lm_head"),
}


@_client(
    "Llama",
    causal,
    asks_for_float32=True,
    plan=LLAMA_PLAN,
    blocks=("model.layers.*",),
    inductor=True,
)
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA))


@_client("Qwen3", causal, asks_for_float32=True, blocks=("model.layers.*",))
def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=4, tie_word_embeddings=True))


@_client("Gemma3", causal, asks_for_float32=True, blocks=("model.layers.*",))
def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **LLAMA,
            head_dim=4,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=4,
        )
    )


@_client(
    "Mixtral",
    causal,
    asks_for_float32=True,
    plan={
        **column("*.self_attn.[qkv]_proj"),
        **row("*.self_attn.o_proj"),
        "*.experts.gate_up_proj": {"tp": Shard(0)},
        "*.experts.down_proj": {"tp": Shard(0)},
        **vocabulary("model.embed_tokens", "lm_head"),
    },
    blocks=("model.layers.*",),
    captured=lambda: mixtral("batched_mm"),  # "eager" loops over the experts that have tokens
)
def mixtral(experts: str = "eager") -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
            experts_implementation=experts,
        )
    )


@_client(
    "GPT-2",
    causal,
    asks_for_float32=True,
    # Its Conv1D holds a weight the other way round: inputs, outputs.
    plan={
        "*.c_attn.weight": {"tp": Shard(1)},
        "*.c_attn.bias": {"tp": Shard(0)},
        "*.c_fc.weight": {"tp": Shard(1)},
        "*.c_fc.bias": {"tp": Shard(0)},
        "*.c_proj.weight": {"tp": Shard(0)},
        **vocabulary("transformer.wte"),
    },
    blocks=("transformer.h.*",),
    inductor=True,
)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


@_client(
    "BERT",
    masked,
    plan={
        **column("*.self.query", "*.self.key", "*.self.value", "*.intermediate.dense"),
        **row("*.attention.output.dense", "bert.encoder.layer.?.output.dense"),
        **vocabulary("bert.embeddings.word_embeddings"),
    },
    blocks=("bert.encoder.layer.*",),
    inductor=True,
)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@_client(
    "T5",
    translated,
    asks_for_float32=True,
    plan={
        **column("*Attention.[qkv]", "*.DenseReluDense.wi"),
        **row("*Attention.o", "*.DenseReluDense.wo"),
        "*.relative_attention_bias.weight": {"tp": Shard(1)},
        **vocabulary("shared"),
    },
    blocks=("encoder.block.*", "decoder.block.*"),
    inductor=True,
)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            tie_word_embeddings=True,
        )
    )


@_client("BART", translated, blocks=("model.encoder.layers.*", "model.decoder.layers.*"))
def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )


@_client("Whisper", spoken, blocks=("model.encoder.layers.*", "model.decoder.layers.*"))
def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=WORDS,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=6,
            max_target_positions=8,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


@_client("Mamba2", causal, asks_for_float32=True, blocks=("backbone.layers.*",))
def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=WORDS,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=8,
            expand=2,
            n_groups=2,
            conv_kernel=3,
            chunk_size=4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


# -- pictures --------------------------------------------------------------------------------------


@_client("ViT", pictures, blocks=("vit.*layer*.*",), inductor=True)
def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@_client("Swin", pictures, blocks=("swin.encoder.layers.*.blocks.*",))
def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(
            image_size=8,
            patch_size=1,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            drop_path_rate=0.0,
        )
    )


@_client("ResNet", pictures, blocks=("resnet.encoder.stages.*.layers.*",), checkpoints=False)
def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[2, 2],
            layer_type="basic",
            num_labels=4,
        )
    )


def _denoised(rows: int) -> Batch:
    return {
        "sample": torch.randn(rows, 3, 8, 8),
        "timestep": torch.randint(0, 1000, (rows,)),
        "noise": torch.randn(rows, 3, 8, 8),
    }


def _denoising(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["sample"], batch["timestep"]).sample, batch["noise"])


@_client(
    "UNet",
    _denoised,
    loss=_denoising,
    blocks=("*.resnets.*", "*.attentions.*"),
    package="diffusers",
)
def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
    )


# -- torch's own -----------------------------------------------------------------------------------


class _Translator(nn.Module):
    """nn.Transformer between embeddings and a head, with masks of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.transformer = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        padding = attention_mask == 0
        words = labels.clamp(min=0)
        causal = nn.Transformer.generate_square_subsequent_mask(
            words.size(1), device=words.device, dtype=torch.get_default_dtype()
        )
        causal = causal.to(self.head.weight.dtype)
        y = self.transformer(
            self.embed(input_ids),
            self.embed(words),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = self.head(y)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@_client(
    "nn.Transformer",
    translated,
    loss=lambda model, batch: model(**batch),
    blocks=("transformer.encoder.layers.*", "transformer.decoder.layers.*"),
    checkpoints=False,
    package="torch",
)
def transformer() -> nn.Module:
    return _Translator()


IN_EACH_RUN = ("Llama", "GPT-2", "BERT", "T5", "ViT")
"""Those that `make test` runs; `make test-clients` runs all."""
