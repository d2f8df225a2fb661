"""Images of a run that cannot be read: how many they are, which, and when there are too many.

The loader replaces each by another image (`tread_zoo.data.loader`). Here they are counted over all
ranks, told once, and listed in `<run>/corrupt.txt`, an item a line: its index in the training
part, its name and the reason, with tabs between. An item counts once, however often it is met, so
the share is that of the data set and not of what was read so far.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tread_zoo.data import CorruptItem
from tread_zoo.data.loader import lost_items, read_item, warn_of
from tread_zoo.process_group import leave_connections
from tread_zoo.training.parts import Parts

if TYPE_CHECKING:
    from accelerate import Accelerator

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
        self._outdated = False  # the list is that of the run before the resume

    @classmethod
    def of_run(
        cls, parts: Parts, accelerator: "Accelerator", folder: Path, *, resumed: bool
    ) -> "CorruptItems":
        """Return those of a run in `folder`; a resumed one tries anew what is listed there.

        Raises:
            ValueError: damaged shards lack more of the training part than may be corrupt.
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
            items._begin_with(lost_items(dataset))
        if resumed and not in_memory and items.file.exists():
            items._outdated = True
            indices = [int(row.split("\t")[0]) for row in items.file.read_text().splitlines()]
            for index in indices[accelerator.process_index :: accelerator.num_processes]:
                found = read_item(dataset, index)
                if isinstance(found, CorruptItem):  # else it was repaired
                    items.add(found)
        return items

    def _begin_with(self, lost: list[CorruptItem]) -> None:
        """Count what is known to be lost before the first step; all ranks know the same."""
        self.known |= {item.index: item for item in lost}
        self._outdated = bool(lost)
        if len(lost) > self.max_share * self.num_items:
            leave_connections()
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
        self._outdated = False
        if len(self.known) > self.max_share * self.num_items:
            leave_connections()
            raise ValueError(self._too_many())
        return {"corrupt_items": len(self.known)} if self.known else {}

    def _write(self) -> None:
        """Write the list beside, and rename it: whole at any time."""
        rows = [(str(i), _plain(k.name), _plain(k.reason)) for i, k in self.known.items()]
        partial = self.file.with_name(f".partial_{self.file.name}")
        partial.write_text("".join("\t".join(row) + "\n" for row in rows))
        os.replace(partial, self.file)
        if not rows:
            self.file.unlink()

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


def _plain(text: str) -> str:
    """Return a text without tabs and line breaks."""
    return " ".join(text.split())
