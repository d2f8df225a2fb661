"""How far an encoding is: the shards to be, the record of each that is done, and what is missing.

    <folder>/encoding.json              what is being encoded, and which shards are to be written
             .train-000000.tar.npz …    the record of a shard: facts, spans, labels, moments

Both are gone once the manifest has it all. A shard whose record or manifest entry does not fit the
file, or whose pictures that were left out can be read by now, is missing and encoded anew.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tread_zoo.data.dataset import ImageData
from tread_zoo.data.files import written_whole
from tread_zoo.data.latents.manifest import PARTS, Manifest, ShardFacts, damage_of
from tread_zoo.data.loader import CorruptItem, read_item

logger = logging.getLogger(__name__)

PLAN = "encoding.json"  # what is being encoded; gone when the manifest is there
_NAMED = 3  # images that an error names


@dataclass(frozen=True)
class Shard:
    """One shard to be: items first … last - 1 of a part."""

    part: str
    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Progress:
    """What is to be done: the shards to encode, and what was left out of all others."""

    missing: list[Shard]
    left_out: list[CorruptItem]


def plan_shards(counts: Mapping[str, int], shard_size: int) -> list[Shard]:
    """Return the shards of both parts, in order."""
    return [
        Shard(part, f"{part}-{number:06d}.tar", first, min(first + shard_size, counts[part]))
        for part in PARTS
        for number, first in enumerate(range(0, counts[part], shard_size))
    ]


def shards_of(manifest: Manifest) -> list[Shard]:
    """Return the shards that were encoded, in the manifest's order."""
    shards = []
    for part in PARTS:
        first = 0
        for facts in manifest.parts[part]:
            last = first + facts.count + len(facts.left_out)
            shards.append(Shard(part, facts.name, first, last))
            first = last
    return shards


def record_file(out: Path, shard: Shard) -> Path:
    """Return where the record of a shard lies."""
    return out / f".{shard.name}.npz"


def write_record(
    out: Path, shard: Shard, arrays: Mapping[str, Any], left_out: Sequence[CorruptItem]
) -> None:
    """Write the record of a shard that is on the disk."""
    text = json.dumps([asdict(item) for item in left_out])
    with written_whole(record_file(out, shard)) as stream:
        np.savez(stream, **{**arrays, "left_out": np.array(text)})


def read_record(out: Path, shard: Shard) -> dict[str, np.ndarray] | None:
    """Return the arrays of a shard's record; None if there is none, or a damaged one."""
    try:
        with np.load(record_file(out, shard), allow_pickle=False) as stored:
            found = {key: stored[key] for key in stored}
        facts_of(shard, found)
    except Exception:  # what NumPy, zip, zlib and json raise; the shard is then encoded anew
        return None
    return found


def facts_of(shard: Shard, record: Mapping[str, np.ndarray]) -> ShardFacts:
    """Return what the manifest says of a shard with this record."""
    left_out = tuple(CorruptItem(**one) for one in json.loads(str(record["left_out"])))
    count = shard.last - shard.first - len(left_out)
    num_bytes, sha256 = int(record["num_bytes"]), str(record["sha256"])
    return ShardFacts(shard.name, count, num_bytes, sha256, left_out)


def survey(
    data: ImageData, out: Path, shards: Sequence[Shard], manifest: Manifest | None, verify: str
) -> Progress:
    """Return what is to be done.

    Args:
        data: what is encoded.
        out: the folder.
        shards: all.
        manifest: the folder's, if it has one.
        verify: `size`, or `sha256`, which reads every byte of the shards that are there.
    """
    recorded = {facts.name: facts for facts in (manifest.shards if manifest else ())}
    found = Progress([], [])
    for shard in shards:
        record = read_record(out, shard)
        facts = recorded.get(shard.name) if record is None else facts_of(shard, record)
        damage = None if facts is None else damage_of(out, facts, verify)
        if facts is None or damage is not None or _can_be_read(data, shard, facts):
            found.missing.append(shard)
            if damage is not None:
                logger.warning("again     %s %s; it is encoded anew", shard.name, damage.reason)
        else:
            found.left_out.extend(facts.left_out)
    return found


def _can_be_read(data: ImageData, shard: Shard, facts: ShardFacts) -> bool:
    """Whether an image that was left out of a shard has been repaired."""
    dataset = data.train if shard.part == "train" else data.held_out
    assert dataset is not None
    for item in facts.left_out:
        if not isinstance(read_item(dataset, item.index), CorruptItem):
            logger.info("again     %s: %s can be read now", shard.name, item.name)
            return True
    return False


def write_plan(out: Path, plan: Mapping[str, Any], progress: Progress) -> None:
    """Write what is being encoded, and what all processes together are to do."""
    content = {
        **plan,
        "missing": [shard.name for shard in progress.missing],
        "left_out": [asdict(item) for item in progress.left_out],
    }
    with written_whole(out / PLAN) as stream:
        stream.write(json.dumps(content, indent=2).encode())


def read_plan(out: Path) -> dict[str, Any]:
    """Return what is being encoded.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        found = json.loads((out / PLAN).read_text())
        if not isinstance(found, dict) or "vae" not in found:
            raise ValueError("it is no plan of an encoding")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(out / PLAN)!r} cannot be read ({error}), so that nothing tells what the shards "
            "beside it are; remove the folder, or choose another one, and encode again."
        ) from error
    return found


def read_progress(out: Path, shards: Sequence[Shard]) -> Progress:
    """Return what `write_plan` was given; nothing where there is no plan."""
    if not (out / PLAN).exists():
        return Progress([], [])
    plan = read_plan(out)
    names = set(plan["missing"])
    left_out = [CorruptItem(**one) for one in plan["left_out"]]
    return Progress([shard for shard in shards if shard.name in names], left_out)


def check_share(left_out: Sequence[CorruptItem], num_images: int, max_share: float) -> None:
    """Raise `ValueError` if more images were left out than `max_share` of all allows."""
    if len(left_out) <= max_share * num_images:
        return
    first = left_out[-1]  # the one that was too much
    raise ValueError(
        f"{len(left_out)} of {num_images} images cannot be read, more than "
        f"max_corrupt_share={max_share:g} allows: "
        f"{'; '.join(item.name for item in left_out[-_NAMED:])} ({' '.join(first.reason.split())}) "
        "Put whole files in their places, or raise max_corrupt_share; the same command goes on "
        "with what is missing."
    )
