"""Text encoders of a few thousand weights with tokenizers of a few words, made from transformers'
configurations."""

import pytest
import torch

WORDS = ("a", "red", "green", "blue", "cross", "frame", "stripes")


def save_clip(folder, *, whole=False):
    """Save CLIP's text encoder, or a whole CLIP, and its tokenizer; return the path."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    letters = sorted({letter for word in WORDS for letter in word})
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], model_max_length=20
    )
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 20,
    }  # fmt: skip
    ids = {"vocab_size": len(vocabulary), "bos_token_id": len(vocabulary) - 2}
    ids |= dict.fromkeys(("eos_token_id", "pad_token_id"), len(vocabulary) - 1)
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(**sizes, **ids)
    if whole:
        vision = transformers.CLIPVisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            image_size=8, patch_size=4,
        )  # fmt: skip
        both = {"text_config": config.to_dict(), "vision_config": vision.to_dict()}
        network = transformers.CLIPModel(transformers.CLIPConfig(**both, projection_dim=8))
    else:
        network = transformers.CLIPTextModel(config)
    network.save_pretrained(folder)
    return str(folder)


def save_t5(folder, *, whole=False, seed=0):
    """Save T5's encoder, or a whole T5, and its tokenizer; return the path."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in WORDS), "▁"]
    tokenizer = transformers.T5Tokenizer(vocab=[(p, -1.0) for p in pieces], extra_ids=0)
    tokenizer.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    kind = transformers.T5ForConditionalGeneration if whole else transformers.T5EncoderModel
    kind(config).save_pretrained(folder)
    return str(folder)


ENCODERS = {"clip": save_clip, "t5": save_t5}
