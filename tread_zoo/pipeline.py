"""A pipeline of diffusers for any backbone, with the samplers and guidance of this project.

    pipe = TreadZooPipeline.from_checkpoint("runs/mine")        # or user/name of the hub
    images = pipe(class_labels=[207], num_inference_steps=25).images
    images = pipe(prompt="a red fox", guidance_scale=4).images  # if trained on captions
    pipe.save_pretrained("folder")
    pipe = TreadZooPipeline.from_pretrained("folder")

B batch, C channels, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from torch import Tensor, nn

from tread_zoo.config import complete_sampler
from tread_zoo.contract.backbone import Backbone
from tread_zoo.data.latents import LatentCodec
from tread_zoo.data.text import TextEncoder
from tread_zoo.data.vae import Vae
from tread_zoo.diffusion import build_sampling, generate
from tread_zoo.diffusion.conditions import class_number, contexts_of
from tread_zoo.factory import build_backbone, describe_backbone
from tread_zoo.registry import complete, create
from tread_zoo.runs.restore import restore
from tread_zoo.runs.weights import check_finite

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class BackboneModel(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A backbone as a component of a pipeline. `described` comes from `describe_backbone`; if
    `network` is None, a network with fresh weights is built from it."""

    ignore_for_config = ["network"]  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, described: dict[str, Any], network: Backbone | None = None) -> None:
        super().__init__()
        self.network = build_backbone(described) if network is None else network

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Any:
        """Return a model that `save_pretrained` wrote to `path`; `options` are those of diffusers.
        It is not built on the meta device, because some backbones compute tables when built.

        Raises:
            CheckpointError: weights are not finite.
        """
        own = {"low_cpu_mem_usage": False, "use_safetensors": True}
        model = super().from_pretrained(path, **{**options, **own})
        check_finite(model.network.state_dict(), Path(path))
        return model


class TreadZooPipeline(DiffusionPipeline):  # type: ignore[misc]
    """A pipeline from labels or prompts to images.

    Args:
        backbone: a trained network.
        vae: the autoencoder of latents, see `tread_zoo.data.vae.CLASSES`; None for pixels.
        objective, sampler, guidance: names, or mappings with `name` and options.
        routing: the routing method of the training, for samplers and guidances that route; None:
            tread with its defaults.
        latent_shift, latent_scale: C numbers each; for latents z the network gets
            (z - shift) * scale. None takes the autoencoder's.
        class_names: names of the labels 0, 1, …
        text_encoder, tokenizer: of transformers, for prompts, see `tread_zoo.data.text.CLASSES`.
        label_dropout: fraction of labels or contexts that training dropped; 0 excludes guidance
            away from no label.
    """

    _optional_components = ["vae", "text_encoder", "tokenizer"]  # noqa: RUF012

    def __init__(
        self,
        backbone: Backbone | BackboneModel,
        vae: nn.Module | None = None,
        objective: str | dict[str, Any] = "flow",
        sampler: str | dict[str, Any] = "euler",
        guidance: str | dict[str, Any] = "none",
        routing: dict[str, Any] | None = None,
        latent_shift: Sequence[float] | None = None,
        latent_scale: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        text_encoder: nn.Module | None = None,
        tokenizer: Any = None,
        label_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if isinstance(backbone, Backbone):
            backbone = BackboneModel(describe_backbone(backbone), backbone)
        text = {"text_encoder": text_encoder, "tokenizer": tokenizer}
        self.register_modules(backbone=backbone.eval(), vae=vae, **text)
        self.register_to_config(
            objective=complete("objective", objective), sampler=complete_sampler(sampler),
            guidance=complete("guidance", guidance), routing=routing, class_names=class_names,
            latent_shift=latent_shift, latent_scale=latent_scale, label_dropout=label_dropout,
        )  # fmt: skip

    @classmethod
    def from_checkpoint(
        cls,
        path: str,
        *,
        weights: str = "ema",
        vae: str | None = None,
        text_encoder: str | None = None,
    ) -> "TreadZooPipeline":
        """Return the pipeline of a run, with its sampler and guidance, on the CPU.

        Args:
            path: a run's folder, a checkpoint, or `user/name` on the hub.
            weights: see `load_backbone`.
            vae: the autoencoder; None is the run's; with `none`, latents are not decoded.
            text_encoder: the text encoder of prompts; None is the run's; with `none`, contexts can
                be given, but no prompts.
        """
        run = restore(path, weights=weights, device="cpu", precision="fp32")
        codec = run.codec(vae)
        kinds = ("objective", "sampler", "guidance", "routing")  # an imported one has no routing
        parts = {kind: run.config[kind] for kind in kinds if kind in run.config}
        training = run.config.get("training", {})  # the usual values for an imported network
        parts["label_dropout"] = training.get("label_dropout", 0.1)
        if isinstance(codec, LatentCodec):
            parts |= {"latent_shift": codec.shift, "latent_scale": codec.scale}
            parts["vae"] = codec.autoencoder.network if codec.has_pixels else None
        if "text_encoder" in run.checkpoint.data and text_encoder != "none":
            encoder = run.text_encoder(text_encoder)
            parts |= {"text_encoder": encoder.network, "tokenizer": encoder.tokenizer}
        return cls(run.backbone, class_names=run.class_names or None, **parts)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | Tensor | None = None,
        *,
        prompt: str | Sequence[str] | None = None,
        contexts: Tensor | None = None,
        num_images: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Return an `ImagePipelineOutput` with an image per label, prompt or context.

        Args:
            class_labels: numbers, 0 … num_classes, or class names.
            prompt: a text or several, for networks that were trained on captions.
            contexts: float [B, T, S], T embeddings of width S, for networks that take contexts.
            num_images: number of images for a single prompt, or if no labels or contexts are given.
            num_inference_steps, guidance_scale: replace the pipeline's values. A scale for a
                pipeline without guidance means classifier-free guidance.
            generator: a generator on the CPU that draws the seed; None is torch's global one.
            output_type: pil; np, [B, H, W, C] in 0 … 1; pt, [B, C, H, W]; latent, not decoded.
            return_dict: False returns (images,).

        Raises:
            ValueError: an unknown class, no encoder for prompts, no autoencoder for images of
                latents, or a guidance or images without labels that training did not prepare.
        """
        labels = contexts if prompt is None else self._encode(prompt, num_images)
        if class_labels is not None:
            many = [class_labels] if isinstance(class_labels, int | str) else class_labels
            many = many.view(-1) if isinstance(many, Tensor) else many
            names = self.config.class_names or ()
            labels = torch.tensor([class_number(label, names) for label in many])
        count = num_images if labels is None else len(labels)
        sampler, guidance = dict(self.config.sampler), dict(self.config.guidance)
        sampler["num_steps"] = num_inference_steps or sampler["num_steps"]
        if guidance_scale is not None:
            name = "cfg" if guidance["name"] == "none" else guidance["name"]
            guidance |= {"name": name, "scale": guidance_scale}
        sampling, network = build_sampling(sampler, guidance), self.backbone.network
        sampling = replace(sampling, trained=create("routing", self.config.routing or "tread"))
        sampling.check_training(network, self.config.label_dropout)
        if labels is None and network.is_conditional and not self.config.label_dropout:
            raise ValueError("training dropped no labels, so each image needs a label or context.")
        x = generate(
            network, create("objective", self.config.objective), sampling,
            indices=range(count), labels=labels,
            seed=int(torch.randint(2**31, (), generator=generator)), batch_size=count,
            precision=_PRECISIONS[self.backbone.dtype],
        )  # fmt: skip
        images = self._decode(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _encode(self, prompt: str | Sequence[str], num_images: int) -> Tensor:
        """Return contexts [B, T, S] of prompts, T embeddings of width S each. A single prompt is
        repeated for `num_images`."""
        if self.text_encoder is None:
            raise ValueError(f"prompt={prompt!r}, but this pipeline has no text_encoder.")
        encoder = TextEncoder(self.text_encoder, self.tokenizer, "text_encoder")
        prompts = [prompt] * num_images if isinstance(prompt, str) else prompt
        contexts = contexts_of(prompts, encoder, self.backbone.network).of(range(len(prompts)))
        assert contexts is not None
        return contexts

    def _decode(self, x: Tensor, output_type: str) -> Any:
        """Return the network's samples x [B, C, H, W] in the form `output_type`, see `__call__`."""
        vae = None if self.vae is None else Vae(self.vae, "vae")
        shift, scale = self.config.latent_shift, self.config.latent_scale
        if vae is not None:
            shift, scale = shift or [vae.shift_factor], scale or [vae.scaling_factor]
        x = x / torch.tensor(scale or [1.0]).view(-1, 1, 1)
        x = x + torch.tensor(shift or [0.0]).view(-1, 1, 1)
        if output_type == "latent":
            return x
        if vae is not None:
            place = next(self.vae.parameters())
            x = torch.cat([vae.decode(z.to(place)).cpu() for z in x.split(8)])
        if x.shape[1] not in (1, 3):
            raise ValueError(
                f"the network has {x.shape[1]} output channels, which are no images: give the "
                "pipeline a vae, or set output_type='latent'."
            )
        return VaeImageProcessor().postprocess(x, output_type=output_type)
