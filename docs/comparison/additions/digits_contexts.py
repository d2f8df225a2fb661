"""Write digits as pictures with contexts: two embeddings of width 16, drawn once for each class.

python docs/comparison/additions/digits_contexts.py digits_contexts
"""

import sys
from pathlib import Path

import numpy as np
from torchvision.transforms.functional import to_pil_image

from tread_zoo.registry import create

folder = Path(sys.argv[1])
folder.mkdir()
contexts = np.random.default_rng(0).standard_normal((10, 2, 16), dtype=np.float32)
data = create("data", "digits")
items = [part[index] for part in (data.train, data.held_out) for index in range(len(part))]
for index, (image, label) in enumerate(items):
    to_pil_image(image).save(folder / f"{index:04d}.png")
    np.save(folder / f"{index:04d}.context.npy", contexts[int(label)])
