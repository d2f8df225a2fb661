"""Writing what a run leaves beside its checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tread_zoo.data.files import written_whole

logger = logging.getLogger(__name__)

CONFIG = "config.json"  # a run's settings
FAILED = "failed.txt"  # why a run of a comparison did not end


@contextmanager
def told_if_not_written(path: Path) -> Iterator[None]:
    """Turn a failure to write a file that the run can do without into a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be written (%s); the run goes on without it", path, error)


def write_text(path: Path, text: str) -> None:
    """Write a file beside and rename it, so that no half of it is ever read."""
    with written_whole(path) as stream:
        stream.write(text.encode())
