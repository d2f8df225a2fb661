"""Images of a run that cannot be read: how many they are, which, and when there are too many.

The loader replaces each by another image (`tread_zoo.data.loader`). Here they are counted over all
ranks, told once, and listed in `<run>/corrupt.txt`, an item a line: its index in the training
part, its name and the reason, with tabs between. An item counts once, however often it is met, so
the share is that of the data set and not of what was read so far. The run can do without the list:
one that cannot be written is a warning, and is tried again with the next numbers.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from tread_zoo.data import CorruptItem
from tread_zoo.data.loader import lost_items, read_item, warn_of, writable
from tread_zoo.process_group import leave_connections
from tread_zoo.training.files import write_text
from tread_zoo.training.parts import Parts
from tread_zoo.training.ranks import failing_together

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

FILE = "corrupt.txt"


class CorruptItems:
    """The corrupt items of a run, the same on all ranks after each `settle`.

    Args:
        accelerator: of the run.
        file: the list.
        num_items: of the training part; 0 where its images lie in memory, so that none can fail.
        max_share: training.max_corrupt_share.
    """

    def __init__(
        self, accelerator: "Accelerator", file: Path, *, num_items: int, max_share: float
    ) -> None:
        self.accelerator, self.file = accelerator, file
        self.num_items, self.max_share = num_items, max_share
        self.known: dict[int, CorruptItem] = {}  # by index
        self._met: list[CorruptItem] = []  # by this rank, since the last `settle`
        self._outdated = False  # the list is not what is known
        self._told = False  # that it cannot be written

    @classmethod
    def of_run(
        cls, parts: Parts, accelerator: "Accelerator", folder: Path, *, resumed: bool
    ) -> "CorruptItems":
        """Return those of a run in `folder`; a resumed one tries anew what is listed there.

        Every rank must call this, and waits for all.

        Raises:
            ValueError: the list is not what a run writes, or damaged shards lack more of the
                training part than may be corrupt.
        """
        dataset = parts.data.train
        in_memory = hasattr(dataset, "gather")
        items = cls(
            accelerator,
            folder / FILE,
            num_items=0 if in_memory else len(dataset),  # type: ignore[arg-type]
            max_share=parts.options.max_corrupt_share,
        )
        if not in_memory:
            with failing_together(accelerator):
                items._begin_with(lost_items(dataset))
                if resumed:
                    items._try_anew(dataset)
        return items

    def _try_anew(self, dataset: Dataset) -> None:
        """Read this rank's share of the listed items."""
        if not self.file.exists():
            return
        self._outdated = True
        indices = _read_indices(self.file, self.num_items)
        for index in indices[self.accelerator.process_index :: self.accelerator.num_processes]:
            found = read_item(dataset, index)
            if isinstance(found, CorruptItem):  # else it was repaired
                self.add(found)

    def _begin_with(self, lost: list[CorruptItem]) -> None:
        """Count what is known to be lost before the first step."""
        self.known |= {item.index: item for item in lost}
        self._outdated = bool(lost)
        if len(lost) > self.max_share * self.num_items:
            reasons = " ".join(list(dict.fromkeys(_plain(item.reason) for item in lost))[:3])
            raise ValueError(
                f"{len(lost)} of {self.num_items} training images are lost, more than "
                f"training.max_corrupt_share={self.max_share:g} allows: {reasons} Put whole files "
                "in their places, or raise training.max_corrupt_share."
            )

    def add(self, item: CorruptItem) -> None:
        """Note an item that this rank's loader met."""
        self._met.append(item)

    def settle(self) -> dict[str, float]:
        """Share what the ranks met since the last call; every rank must call this.

        Returns:
            `corrupt_items`, how many there are by now; nothing as long as there is none.

        Raises:
            ValueError: they are more than training.max_corrupt_share allows; on all ranks at once.
        """
        if not self.num_items:
            return {}
        new = {item.index: item for item in self._from_all_ranks() if item.index not in self.known}
        self.known |= new
        if self.accelerator.is_main_process and (new or self._outdated):
            for item in new.values():
                warn_of(item)
            self._write()
        if len(self.known) > self.max_share * self.num_items:
            leave_connections()
            raise ValueError(self._too_many())
        return {"corrupt_items": len(self.known)} if self.known else {}

    def _write(self) -> None:
        """Write the list, whole at any time; what fails is tried again with the next `settle`."""
        rows = [(str(i), _plain(k.name), _plain(k.reason)) for i, k in self.known.items()]
        try:
            if rows:
                write_text(self.file, "".join("\t".join(row) + "\n" for row in rows))
            else:
                self.file.unlink(missing_ok=True)
        except OSError as error:
            if not self._told:
                logger.warning(
                    "%s could not be written, and is tried again with the next numbers; the run "
                    "goes on: %s", self.file, error,
                )  # fmt: skip
            self._outdated = self._told = True
        else:
            self._outdated = self._told = False

    def _from_all_ranks(self) -> list[CorruptItem]:
        met, self._met = self._met, []
        if self.accelerator.num_processes == 1:
            return met
        count = torch.tensor(len(met), device=self.accelerator.device)
        if not int(self.accelerator.reduce(count, reduction="sum")):
            return []  # as always but for once in a while
        from accelerate.utils import gather_object

        return gather_object(met)

    def _too_many(self) -> str:
        examples = "; ".join([item.name for item in self.known.values()][:3])
        return (
            f"{len(self.known)} of {self.num_items} training images cannot be read, more than "
            f"training.max_corrupt_share={self.max_share:g} allows: {examples}. {self.file} lists "
            "them with the reasons. Put whole files in their places, or raise "
            "training.max_corrupt_share, and continue with resume=latest from the last checkpoint; "
            "without them it is a new run, in another order."
        )


def _read_indices(file: Path, num_items: int) -> list[int]:
    """Return the indices that a list has; `ValueError` names the line that has none."""
    indices = []
    for number, row in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        index = row.split("\t")[0]
        if not (index.isdecimal() and int(index) < num_items):
            raise ValueError(
                f"{file}, line {number}: {row[:80]!r} does not begin with the index of a training "
                f"image (0 … {num_items - 1}) and a tab. Mend the line or delete the file: the run "
                "lists what cannot be read again as it meets it."
            )
        indices.append(int(index))
    return indices


def _plain(text: str) -> str:
    """Return a text without tabs and line breaks, that can be written."""
    return writable(" ".join(text.split()))
