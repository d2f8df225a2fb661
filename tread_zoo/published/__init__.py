"""The checkpoints that other projects publish, as checkpoints of ours.

    file -> reader: tensors, without running code -> format: names, layouts, sizes -> checkpoint

Nothing is guessed silently: a tensor too many or too few, a shape that differs, fixed positions
that are not ours, each stops the import and is named. Times differ; ours is of order 1 with noise
at 1, and `time_scale` is the factor between.

conversion.py      from a file to a checkpoint folder
export.py         from a checkpoint folder to a file
reader.py          what a file holds
format.py          what a format is
dit.py             DiT, SiT, TREAD
uvit.py            U-ViT
dis.py             DiS
drwkv.py           Diffusion-RWKV
lightning_dit.py   LightningDiT
zigma.py           ZigMa
diffusers.py       our dit as a class of diffusers
"""

from tread_zoo.published.conversion import FORMATS, Imported, import_checkpoint
from tread_zoo.published.export import export_checkpoint

__all__ = ["FORMATS", "Imported", "export_checkpoint", "import_checkpoint"]
