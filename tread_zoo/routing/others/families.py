"""How known classes of networks arrange their tokens, by class name; diffusers is not imported.

N image tokens, T other tokens of the same sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Arguments = Mapping[str, Any]  # arguments of the network's forward, by name

LISTS = (
    "transformer_blocks", "joint_transformer_blocks", "double_stream_blocks", "blocks", "layers",
    "single_transformer_blocks", "single_stream_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a class of networks arranges its tokens.

    Args:
        lists: names of its lists of blocks in order of use; missing ones are ignored.
        watch: names of lists whose blocks run before those of `lists`, on image tokens only; their
            first call shows N, the number of image tokens.
        image_first: whether the image comes before the other tokens where both are one sequence.
        offsets: function that returns, from the network's arguments, the position [B] at which each
            image begins in a sequence with other tokens.
        extra: function that returns T, the number of non-image tokens, from the network's arguments
            and the tokens [B, N + T, D] of the first block.
        crosses: whether a route may run from one list into the next.
        shared: whether arguments per token that have no batch dimension, such as rotary tables,
            must not get one; then all images of a batch keep the same tokens.
        text: names of blocks' arguments for other tokens, beyond those that begin with a word of
            `arguments.OTHER`; "name.1" is the second element of a tuple.
        unfit: function that returns, from the network and its arguments, why it cannot be routed,
            or "" if it can.
    """

    lists: tuple[str, ...] = LISTS
    watch: tuple[str, ...] = ()
    image_first: bool = False
    offsets: Callable[[Arguments], Tensor] | None = None
    extra: Callable[[Arguments, Tensor], int] | None = None
    crosses: bool = True
    shared: bool = False
    text: tuple[str, ...] = ()
    unfit: Callable[[Any, Arguments], str] | None = None


def _caption_lengths(arguments: Arguments) -> Tensor:
    return arguments["encoder_attention_mask"].sum(dim=1)


def _one(arguments: Arguments, tokens: Tensor) -> int:
    return 1


def _before_packed(arguments: Arguments, tokens: Tensor) -> int:
    return tokens.shape[1] - arguments["hidden_states"].shape[1]


def _before_patches(arguments: Arguments, tokens: Tensor) -> int:
    return tokens.shape[1] - arguments["hidden_states"][0, 0].numel() // 4  # patches of 2x2


def _has_clean_frame(network: Any, arguments: Arguments) -> str:
    if network.config.image_condition_type != "token_replace":
        return ""
    return "with image_condition_type='token_replace', its blocks treat the first frame otherwise"


def _has_two_sizes(network: Any, arguments: Arguments) -> str:
    if len({image.shape for image in arguments["x"]}) == 1:
        return ""
    return "the images of this batch have several sizes, and it mixes their tokens with the text's"


IMAGE = (  # classes whose text has its own stream, or is attended to
    "AllegroTransformer3DModel", "AuraFlowTransformer2DModel", "BriaTransformer2DModel",
    "ChromaTransformer2DModel", "CogVideoXTransformer3DModel", "CogView3PlusTransformer2DModel",
    "DiTTransformer2DModel", "EasyAnimateTransformer3DModel", "Flux2Transformer2DModel",
    "FluxTransformer2DModel", "LTXVideoTransformer3DModel", "MochiTransformer3DModel",
    "PixArtTransformer2DModel", "SD3Transformer2DModel", "SanaTransformer2DModel",
    "WanTransformer3DModel",
)  # fmt: skip
MASKED_TEXT = (  # as IMAGE; blocks get a mask of the text
    "CogView4Transformer2DModel", "CosmosTransformer3DModel", "PRXTransformer2DModel",
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(IMAGE, Family()),
    **dict.fromkeys(MASKED_TEXT, Family(text=("attention_mask",))),
    "HiDreamImageTransformer2DModel": Family(image_first=True, crosses=False),
    "HunyuanDiT2DModel": Family(lists=("blocks",)),
    "HunyuanImageTransformer2DModel": Family(image_first=True),
    "HunyuanVideoTransformer3DModel": Family(image_first=True, unfit=_has_clean_frame),
    "Krea2Transformer2DModel": Family(extra=_before_packed),
    "Lumina2Transformer2DModel": Family(("layers",), ("noise_refiner",), offsets=_caption_lengths),
    "OmniGenTransformer2DModel": Family(extra=_before_patches),
    "QwenImageTransformer2DModel": Family(text=("image_rotary_emb.1",)),
    "StableAudioDiTModel": Family(extra=_one, shared=True),
    "ZImageTransformer2DModel": Family(
        ("layers",), ("noise_refiner",), image_first=True, unfit=_has_two_sizes
    ),
}
REFUSED = {
    "LatteTransformer3DModel": "its blocks attend along space and time in turn, on a full grid"
}
