"""Tiny networks of diffusers, and their inputs, by the name of the class.

B = 2 images of N = 16 tokens unless said otherwise; weights are random, none zero.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HAS_DIFFUSERS = importlib.util.find_spec("diffusers") is not None

BATCH = 2
Inputs = dict[str, Any]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def steps(batch):
    return torch.tensor([100, 700, 300, 900] * batch)[:batch]


def image(batch, channels=4, size=8, *frames):
    return draw(batch, channels, *frames, size, size)


def positions(height=4, width=4, axes=3):
    ids = torch.zeros(height, width, axes)
    ids[..., -2] += torch.arange(height)[:, None]
    ids[..., -1] += torch.arange(width)[None]
    return ids.view(height * width, axes)


@dataclass(frozen=True)
class Case:
    """A class, its configuration, and its inputs as a function of the batch."""

    config: dict[str, Any]
    inputs: Callable[[int], Inputs]
    start: int = 1
    end: int = -1

    def one_of(self, batch):
        """Return the inputs of a batch whose first image equals that of a batch of 1."""
        one, two = self.inputs(1), self.inputs(batch)

        def same(a, b):
            if isinstance(b, torch.Tensor) and a.shape != b.shape:
                dim = next(i for i, n in enumerate(b.shape) if n != a.shape[i])
                return torch.cat([a, b.narrow(dim, 1, batch - 1)], dim)
            if isinstance(b, torch.Tensor):
                return a
            if isinstance(b, list) and b and isinstance(b[0], torch.Tensor) and len(b) == batch:
                return [*a, *b[1:]]
            return b

        return {name: same(one[name], value) for name, value in two.items()}


def heads(layers=4, **more):
    return {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": layers, **more}


def flux_inputs(batch, axes=3, pooled=True, text=5):
    inputs = {
        "hidden_states": draw(batch, 16, 4), "encoder_hidden_states": draw(batch, text, 16),
        "timestep": steps(batch) / 1000, "img_ids": positions(axes=axes),
        "txt_ids": torch.zeros(text, axes),
    }  # fmt: skip
    return {**inputs, "pooled_projections": draw(batch, 16)} if pooled else inputs


def text_inputs(batch, **more):
    return {
        "hidden_states": image(batch), "timestep": steps(batch),
        "encoder_hidden_states": draw(batch, 5, 16), **more,
    }  # fmt: skip


def sizes(batch):
    size = torch.tensor([[64.0, 64.0]]).expand(batch, 2)
    return {"original_size": size, "target_size": size, "crop_coords": torch.zeros(batch, 2)}


def mask(batch, *lengths, most=5):
    lengths = torch.tensor((lengths or (most, 3)) * batch)[:batch]
    return torch.arange(most)[None] < lengths[:, None]


CASES: dict[str, Case] = {
    "DiTTransformer2DModel": Case(
        heads(in_channels=4, sample_size=8, patch_size=2, num_embeds_ada_norm=10),
        lambda b: {
            "hidden_states": image(b), "timestep": steps(b),
            "class_labels": torch.arange(b) % 10,
        },
    ),
    "PixArtTransformer2DModel": Case(
        heads(in_channels=4, sample_size=8, cross_attention_dim=16, caption_channels=16),
        lambda b: text_inputs(
            b, encoder_attention_mask=mask(b),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    ),
    "SD3Transformer2DModel": Case(
        heads(
            in_channels=4, out_channels=4, sample_size=8, joint_attention_dim=16,
            caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
            dual_attention_layers=(1,), qk_norm="rms_norm",
        ),
        lambda b: text_inputs(b, pooled_projections=draw(b, 16)),
    ),
    "FluxTransformer2DModel": Case(
        heads(
            2, in_channels=4, num_single_layers=2, joint_attention_dim=16,
            pooled_projection_dim=16, axes_dims_rope=(4, 2, 2),
        ),
        flux_inputs,
    ),
    "Flux2Transformer2DModel": Case(
        heads(
            2, in_channels=4, num_single_layers=2, joint_attention_dim=16,
            axes_dims_rope=(2, 2, 2, 2), timestep_guidance_channels=16, guidance_embeds=False,
        ),
        lambda b: flux_inputs(b, axes=4, pooled=False),
    ),
    "ChromaTransformer2DModel": Case(
        heads(
            2, in_channels=4, num_single_layers=2, joint_attention_dim=16,
            axes_dims_rope=(4, 2, 2), approximator_num_channels=8, approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        lambda b: flux_inputs(b, pooled=False) | {
            "attention_mask": torch.cat([mask(b), torch.ones(b, 16, dtype=torch.bool)], 1),
        },
    ),
    "BriaTransformer2DModel": Case(
        heads(
            2, in_channels=4, num_single_layers=2, joint_attention_dim=16,
            axes_dims_rope=[4, 2, 2],
        ),
        lambda b: flux_inputs(b, pooled=False),
    ),
    "PRXTransformer2DModel": Case(
        {
            "in_channels": 4, "context_in_dim": 16, "hidden_size": 16, "num_heads": 2, "depth": 4,
            "axes_dim": [4, 4],
        },
        lambda b: text_inputs(b, attention_mask=mask(b)),
    ),
    "SanaTransformer2DModel": Case(
        heads(
            in_channels=4, out_channels=4, sample_size=4, num_cross_attention_heads=2,
            cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
        ),
        lambda b: text_inputs(b) | {"hidden_states": image(b, size=4)},
    ),
    "AuraFlowTransformer2DModel": Case(
        {
            "sample_size": 8, "num_mmdit_layers": 2, "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16,
            "pos_embed_max_size": 64,
        },
        text_inputs,
    ),
    "QwenImageTransformer2DModel": Case(
        heads(in_channels=4, out_channels=1, joint_attention_dim=16, axes_dims_rope=(4, 2, 2)),
        lambda b: {
            "hidden_states": draw(b, 16, 4), "encoder_hidden_states": draw(b, 5, 16),
            "encoder_hidden_states_mask": mask(b), "timestep": steps(b) / 1000,
            "img_shapes": [(1, 4, 4)] * b,
        },
    ),
    "WanTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
            "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 4, "rope_max_seq_len": 32,
        },
        lambda b: text_inputs(b) | {"hidden_states": image(b, 4, 8, 2)},
    ),
    "LTXVideoTransformer3DModel": Case(
        heads(
            in_channels=4, out_channels=4, cross_attention_dim=16, caption_channels=16,
        ),
        lambda b: {
            "hidden_states": draw(b, 16, 4), "encoder_hidden_states": draw(b, 5, 16),
            "timestep": steps(b), "encoder_attention_mask": mask(b), "num_frames": 1,
            "height": 4, "width": 4,
        },
    ),
    "Lumina2Transformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 4,
            "num_refiner_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "axes_dim_rope": (4,
            4, 4),
            "axes_lens": (32, 16, 16), "cap_feat_dim": 16,
        },
        lambda b: text_inputs(b, encoder_attention_mask=mask(b)),
    ),
    "ZImageTransformer2DModel": Case(
        {
            "in_channels": 4, "dim": 32, "n_layers": 4, "n_refiner_layers": 1, "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
        },
        lambda b: {
            "x": list(image(b, 4, 12, 1)), "t": steps(b) / 1000,
            "cap_feats": [draw(n, 16) for n in (5, 40, 3, 2)[:b]],
        },
    ),
    "OmniGenTransformer2DModel": Case(
        {
            "in_channels": 4, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "num_layers": 4, "pad_token_id": 0, "vocab_size": 20,
            "time_step_dim": 16, "pos_embed_max_size": 8,
            "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        },
        lambda b: {
            "hidden_states": image(b), "timestep": steps(b),
            "input_ids": torch.arange(1, 6).expand(b, 5), "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(b, 22, 22), "position_ids": torch.arange(22).expand(b, 22),
        },
    ),
    "HiDreamImageTransformer2DModel": Case(
        heads(
            4, patch_size=2, in_channels=4, out_channels=4, num_single_layers=2,
            caption_channels=[16, 16], text_emb_dim=16, axes_dims_rope=(4, 2, 2),
            max_resolution=(8, 8), llama_layers=[0, 1, 0, 1, 0, 1], force_inference_output=True,
        ),
        lambda b: {
            "hidden_states": image(b), "timesteps": steps(b),
            "encoder_hidden_states_t5": draw(b, 5, 16),
            "encoder_hidden_states_llama3": draw(b, 2, 3, 16).transpose(0, 1),
            "pooled_embeds": draw(b, 16),
        },
        end=3,
    ),
    "HunyuanVideoTransformer3DModel": Case(
        heads(
            2, in_channels=4, out_channels=4, num_single_layers=2, num_refiner_layers=1,
            text_embed_dim=16, pooled_projection_dim=16, rope_axes_dim=(4, 2, 2),
            guidance_embeds=False,
        ),
        lambda b: text_inputs(b, encoder_attention_mask=mask(b), pooled_projections=draw(b, 16))
        | {"hidden_states": image(b, 4, 8, 1)},
    ),
    "HunyuanImageTransformer2DModel": Case(
        heads(
            2, in_channels=4, out_channels=4, num_single_layers=2, num_refiner_layers=1,
            text_embed_dim=16, rope_axes_dim=(4, 4), patch_size=(2, 2),
        ),
        lambda b: text_inputs(b, encoder_attention_mask=mask(b)) | {"timestep": steps(b).float()},
    ),
    "HunyuanDiT2DModel": Case(
        heads(
            6, in_channels=4, patch_size=2, sample_size=8, hidden_size=16, cross_attention_dim=16,
            cross_attention_dim_t5=16, pooled_projection_dim=16, text_len=5, text_len_t5=5,
            activation_fn="gelu-approximate",
        ),
        lambda b: {
            "hidden_states": image(b), "timestep": steps(b).float(),
            "encoder_hidden_states": draw(b, 5, 16), "text_embedding_mask": mask(b),
            "encoder_hidden_states_t5": draw(b, 5, 16), "text_embedding_mask_t5": mask(b),
            "image_meta_size": torch.ones(b, 6), "style": torch.zeros(b, dtype=torch.int64),
            "image_rotary_emb": [draw(16, 8), draw(16, 8, seed=1)],
        },
    ),
    "CogVideoXTransformer3DModel": Case(
        heads(
            in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=16, sample_width=8,
            sample_height=8, sample_frames=1, max_text_seq_length=5,
            use_rotary_positional_embeddings=True,
        ),
        lambda b: text_inputs(b) | {
            "hidden_states": draw(b, 1, 4, 8, 8),
            "image_rotary_emb": (draw(16, 8), draw(16, 8, seed=1)),
        },
    ),
    "CogView3PlusTransformer2DModel": Case(
        heads(
            in_channels=4, out_channels=4, text_embed_dim=16, time_embed_dim=8, condition_dim=8,
            pos_embed_max_size=8, sample_size=8,
        ),
        lambda b: text_inputs(b, **sizes(b)),
    ),
    "CogView4Transformer2DModel": Case(
        heads(
            in_channels=4, out_channels=4, text_embed_dim=16, time_embed_dim=8, condition_dim=8,
            pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8),
        ),
        lambda b: text_inputs(b, **sizes(b)),
    ),
    "MochiTransformer3DModel": Case(
        heads(
            in_channels=4, pooled_projection_dim=16, text_embed_dim=16, time_embed_dim=16,
            max_sequence_length=5,
        ),
        lambda b: text_inputs(b, encoder_attention_mask=mask(b))
        | {"hidden_states": image(b, 4, 8, 1)},
    ),
    "AllegroTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 4, "in_channels": 4,
            "out_channels": 4, "cross_attention_dim": 24, "caption_channels": 16,
            "sample_height": 8,
            "sample_width": 8, "sample_frames": 1,
        },
        lambda b: text_inputs(b, attention_mask=torch.ones(b, 1, 8, 8)) | {
            "hidden_states": image(b, 4, 8, 1),
            "encoder_hidden_states": draw(b, 1, 5, 16),
            "encoder_attention_mask": mask(b)[:, None].float(),
            "image_rotary_emb": (
                tuple((draw(6, 4, seed=i), draw(6, 4, seed=9 + i)) for i in range(3)),
                tuple(torch.arange(16)[None] % (i + 3) for i in range(3)),
            ),
        },
    ),
    "CosmosTransformer3DModel": Case(
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
            "num_layers": 4, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4,
            "max_size": (4, 16, 16),
        },
        lambda b: text_inputs(b, padding_mask=torch.zeros(1, 1, 8, 8))
        | {"hidden_states": image(b, 4, 8, 1)},
    ),
    "Krea2Transformer2DModel": Case(
        heads(
            in_channels=4, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16,
            text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
            text_num_key_value_heads=2, text_intermediate_size=16, num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2),
        ),
        lambda b: {
            "hidden_states": draw(b, 16, 4), "encoder_hidden_states": draw(b, 5, 2, 16),
            "timestep": steps(b) / 1000,
            "position_ids": torch.cat([torch.zeros(5, 3), positions()]),
            "encoder_attention_mask": mask(b),
        },
    ),
    "StableAudioDiTModel": Case(
        heads(
            in_channels=4, out_channels=4, num_key_value_attention_heads=1, sample_size=16,
            cross_attention_dim=16, time_proj_dim=16, global_states_input_dim=16,
            cross_attention_input_dim=16,
        ),
        lambda b: {
            "hidden_states": draw(b, 4, 16), "timestep": steps(b),
            "encoder_hidden_states": draw(b, 5, 16), "global_hidden_states": draw(b, 1, 16),
            "rotary_embedding": (draw(17, 4), draw(17, 4, seed=1)),
        },
    ),
    "EasyAnimateTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4,
            "in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_width": 8,
            "sample_height": 8,
            "mmdit_layers": 2, "time_embed_dim": 8, "text_embed_dim": 16,
            "add_noise_in_inpaint_model": False,
        },
        lambda b: text_inputs(b) | {"hidden_states": image(b, 4, 8, 1)},
    ),
    "LatteTransformer3DModel": Case(
        heads(
            in_channels=4, sample_size=8, patch_size=2, norm_type="ada_norm_single",
            caption_channels=16, cross_attention_dim=16, video_length=2,
        ),
        lambda b: text_inputs(b) | {"hidden_states": image(b, 4, 8, 2)},
    ),
}  # fmt: skip


def build(name, dtype=torch.float32, **changes):
    """Return a network in train(), whose weights are all random and none zero."""
    import diffusers

    torch.manual_seed(0)
    cls, config = getattr(diffusers, name), {**CASES[name].config, **changes}
    known = inspect.signature(cls.__init__).parameters
    assert set(config) <= set(known), set(config) - set(known)
    network = cls(**config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in network.parameters():
            each.copy_(
                torch.randn(each.shape, generator=generator) * (0.3 if each.ndim > 1 else 0.5)
            )
    for module in network.modules():  # random conditions, dropped ones included
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return (network if dtype == torch.float32 else network.to(dtype)).train()


def run(network, inputs):
    """Return the network's output as one tensor."""
    out = network(**inputs, return_dict=False)[0]
    return torch.stack(list(out)) if isinstance(out, list | tuple) else out
