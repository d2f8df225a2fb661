"""An old name, until its last user is gone."""

from tread_zoo.data.table import PictureTable as FileDataset  # noqa: F401
