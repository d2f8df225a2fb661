"""Images with contexts, and latents of them, made here; no autoencoder is needed."""

import torch

from tests.data.test_latents import Stub
from tests.data.vaes import image_data
from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.data.contexts import WithContexts
from tread_zoo.data.latents.encode import EncodingOptions, encode_latents
from tread_zoo.seeding import make_generator

SHAPE = (3, 4)  # T, S


def made_contexts(count, seed=0, shape=SHAPE):
    """Contexts float32 [count, T, S]; the last embedding of every other one is the zeros that fill
    it up."""
    found = torch.randn(count, *shape, generator=make_generator("made contexts", seed))
    found[::2, -1] = 0
    return found


def with_contexts(num_train=24, num_held_out=6, shape=SHAPE):
    """Random images of 8x8, each with a context."""
    plain = image_data(num_train, num_held_out)
    parts = [
        WithContexts(part, made_contexts(len(part), seed, shape), range(len(part)))
        for seed, part in enumerate((plain.train, plain.held_out))
    ]
    return ImageData("made", *parts, (8, 8), 3, 0, (), context=shape)


def grey_with_contexts(levels, contexts, copies):
    """Flat images of some grey levels, each with the context of its level, `copies` of each."""
    images = torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    images = images.repeat(copies, 1, 1, 1)
    part = WithContexts(ArrayDataset(images), list(contexts) * copies, range(len(images)))
    return ImageData("grey", part, part, (8, 8), 3, 0, (), context=tuple(contexts[0].shape))


def write_latents(folder, data=None, **options):
    """Encode `data` by a stub: [3,4,4], the mean of 2x2 pixels; return the folder."""
    given = {"content": "mode", "batch_size": 4, "shard_size": 10, **options}
    encode_latents(
        data or with_contexts(), Stub(), folder, EncodingOptions(**given), source={"name": "made"}
    )
    return folder
