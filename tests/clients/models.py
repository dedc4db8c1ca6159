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
        modes: those in which it is trained; empty for all that serve it.
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
    modes: tuple[str, ...] = ()
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


# -- language and pictures -------------------------------------------------------------------------

SHARDED = ("ZeRO-3", "pt.compile, ZeRO-3")
IMAGE = 35
"""The word in whose places a language model puts what it sees."""


def _seen(rows: int, words: int, **pictures: Tensor) -> Batch:
    """Padded words behind the `words` places of a picture, and the pictures."""
    batch = padded_words(rows)
    text = batch["input_ids"] % IMAGE
    places = torch.full((rows, words), IMAGE)
    mask = torch.cat([torch.ones_like(places), batch["attention_mask"]], 1)
    ids = torch.cat([places, text], 1)
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **pictures}


def _patches(rows: int) -> Batch:
    """Pictures as Qwen's processors cut them: two of 4 x 4 patches beside two of 2 x 4."""
    grid = torch.tensor([[1, 4, 4] if i % 2 else [1, 2, 4] for i in range(rows)])
    batch = _seen(rows, 4)
    ids = batch["input_ids"]
    ids[0::2, 2:4] = 5  # the smaller picture has two places
    kinds = (ids == IMAGE).long()
    kept = batch["labels"].clone()
    kept[0::2, 2:4] = 5
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 2 * 2)
    return {
        **batch,
        "labels": kept,
        "mm_token_type_ids": kinds,
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


QWEN_TEXT = {
    **LLAMA,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 0, 1], "rope_theta": 1e4},
}


@_client(
    "Qwen2-VL",
    modes=SHARDED,
    batch=_patches,
    asks_for_float32=True,
    blocks=("model.language_model.layers.*",),
)
def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=dict(QWEN_TEXT),
            vision_config={
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "mlp_ratio": 1,
                "patch_size": 2,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
            },
            image_token_id=IMAGE,
            video_token_id=36,
            vision_start_token_id=33,
            vision_end_token_id=34,
        )
    )


@_client(
    "Qwen2.5-VL",
    modes=SHARDED,
    batch=_patches,
    asks_for_float32=True,
    blocks=("model.language_model.layers.*",),
)
def qwen25_vl() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=dict(QWEN_TEXT),
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "out_hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 2,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            image_token_id=IMAGE,
            video_token_id=36,
            vision_start_token_id=33,
            vision_end_token_id=34,
        )
    )


def _gemma_pictures(rows: int) -> Batch:
    batch = _seen(rows, 4, pixel_values=torch.randn(rows, 3, 8, 8))
    return {**batch, "token_type_ids": (batch["input_ids"] == IMAGE).long()}


@_client(
    "Gemma3, pictures",
    modes=SHARDED,
    batch=_gemma_pictures,
    asks_for_float32=True,
    blocks=("model.language_model.layers.*",),
)
def gemma3_pictures() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **LLAMA,
                "head_dim": 4,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 4,
            },
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 2,
            },
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=33,
            eoi_token_index=34,
        )
    )


@_client(
    "LLaVA",
    modes=SHARDED,
    batch=lambda rows: _seen(rows, 4, pixel_values=torch.randn(rows, 3, 8, 8)),
    asks_for_float32=True,
    blocks=("model.language_model.layers.*",),
)
def llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            text_config=LlamaConfig(**LLAMA),
            image_token_index=IMAGE,
            image_seq_length=4,
        )
    )


# -- states and experts ----------------------------------------------------------------------------


@_client("Mamba", modes=SHARDED, batch=causal, asks_for_float32=True, blocks=("backbone.layers.*",))
def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            conv_kernel=3,
            time_step_rank=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


@_client(
    "Jamba",
    modes=SHARDED,
    batch=causal,
    asks_for_float32=True,
    blocks=("model.layers.*",),
    captured=lambda: jamba("batched_mm"),
)
def jamba(experts: str = "eager") -> nn.Module:
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(
        JambaConfig(
            **LLAMA,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            mamba_d_state=4,
            mamba_d_conv=3,
            mamba_dt_rank=2,
            use_mamba_kernels=False,
            experts_implementation=experts,
        )
    )


@_client(
    "Qwen3-Next",
    modes=SHARDED,
    batch=causal,
    asks_for_float32=True,
    blocks=("model.layers.*",),
    captured=lambda: qwen3_next("batched_mm"),
)
def qwen3_next(experts: str = "eager") -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **LLAMA,
            head_dim=4,
            linear_conv_kernel_dim=3,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"],
            experts_implementation=experts,
        )
    )


# -- detection, segments, series -------------------------------------------------------------------


def _framed(rows: int) -> Batch:
    mask = torch.ones(rows, 32, 32, dtype=torch.long)
    mask[1::2, :, 24:] = 0
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32),
        "pixel_mask": mask,
        "classes": torch.randint(0, 4, (rows, 5)),
        "boxes": torch.rand(rows, 5, 4),
    }


def _detecting(model: nn.Module, batch: Batch) -> Tensor:
    """Each query has its class and box: the matching of scipy reads values by design."""
    batch = dict(batch)
    classes, boxes = batch.pop("classes"), batch.pop("boxes")
    found = model(**batch)
    loss = F.cross_entropy(found.logits.flatten(0, 1), classes.flatten())
    return loss + F.l1_loss(found.pred_boxes, boxes)


@_client(
    "DETR",
    modes=SHARDED,
    batch=_framed,
    loss=_detecting,
    blocks=("model.*coder.layers.*",),
    checkpoints=False,
)
def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    return DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 1],
                layer_type="basic",
                out_features=["stage2"],
            ),
            num_queries=5,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            num_labels=3,
        )
    )


def _segmented(rows: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32),
        "classes": torch.randint(0, 4, (rows, 5)),
        "masks": torch.rand(rows, 5, 16, 16).round(),
    }


def _segmenting(model: nn.Module, batch: Batch) -> Tensor:
    found = model(pixel_values=batch["pixel_values"])
    loss = F.cross_entropy(found.class_queries_logits.flatten(0, 1), batch["classes"].flatten())
    masks = found.masks_queries_logits
    return loss + F.binary_cross_entropy_with_logits(masks, batch["masks"].to(masks.dtype))


@_client(
    "Mask2Former",
    modes=SHARDED,
    batch=_segmented,
    loss=_segmenting,
    blocks=("model.transformer_module.decoder.layers.*",),
    checkpoints=False,
)
def mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    return Mask2FormerForUniversalSegmentation(
        Mask2FormerConfig(
            backbone_config=SwinConfig(
                image_size=32,
                patch_size=2,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[2, 2, 2, 2],
                window_size=2,
                drop_path_rate=0.0,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=24,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=2,
            dropout=0.0,
            dim_feedforward=24,
            num_queries=5,
            num_labels=3,
        )
    )


def _observed(rows: int) -> Batch:
    mask = torch.ones(rows, 12, 3, dtype=torch.bool)
    mask[1::2, :3] = False
    return {
        "past_values": torch.randn(rows, 12, 3),
        "past_observed_mask": mask,
        "future_values": torch.randn(rows, 4, 3),
    }


@_client(
    "PatchTST",
    modes=SHARDED,
    batch=_observed,
    blocks=("model.encoder.layers.*",),
    checkpoints=False,
)
def patch_tst() -> nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    return PatchTSTForPrediction(
        PatchTSTConfig(
            num_input_channels=3,
            context_length=12,
            prediction_length=4,
            patch_length=3,
            patch_stride=3,
            num_hidden_layers=2,
            d_model=16,
            num_attention_heads=2,
            ffn_dim=24,
            loss="mse",
            attention_dropout=0.0,
            head_dropout=0.0,
        )
    )


def _heard(rows: int) -> Batch:
    labels = torch.randint(1, WORDS, (rows, 2))
    labels[1::2, 1:] = -100
    mask = torch.ones(rows, 60, dtype=torch.long)
    mask[1::2, 40:] = 0
    return {"input_values": torch.randn(rows, 60), "attention_mask": mask, "labels": labels}


@_client(
    "Wav2Vec2",
    modes=SHARDED,
    batch=_heard,
    asks_for_float32=True,
    blocks=("wav2vec2.encoder.layers.*",),
)
def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            mask_feature_prob=0.0,
            ctc_loss_reduction="mean",
            pad_token_id=0,
        )
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
