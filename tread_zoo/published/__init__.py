"""Import of checkpoints from other projects, and export to their files.

conversion.py   from a file to a checkpoint folder
export.py       from a checkpoint folder to a file
reader.py       reads the tensors in a file, without running code in it
format.py       describes a format: names, sizes and rules; every other module describes one

Missing or unknown tensors, wrong shapes and wrong position tables raise errors that name them. Our
time is of order 1, with noise at 1; `time_scale` converts it to the project's time.
"""

from tread_zoo.published.conversion import FORMATS, Imported, import_checkpoint
from tread_zoo.published.export import export_checkpoint

__all__ = ["FORMATS", "Imported", "export_checkpoint", "import_checkpoint"]
