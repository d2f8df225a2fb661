"""Captions of pictures, and their contexts from a text encoder of transformers (extra `text`).

    context(text) = e(text) - e("")

e(text) are the encoder's last hidden states [T, S], set to 0 behind the end of the text. So the
context of the empty text is all zeros, like the context that replaces dropped ones in training. The
subtraction loses nothing: a network that maps embeddings by a matrix W and then adds learned
positions can learn W e("") as a part of the positions.

Dimensions: B texts, T embeddings of width S.
"""

import hashlib
import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import as_half
from tread_zoo.data.dataset import ImageData, as_bytes
from tread_zoo.data.files import atomic_file, cache_folder
from tread_zoo.data.split import digest_items
from tread_zoo.data.vae import digest_weights
from tread_zoo.errors import unknown_name
from tread_zoo.progress import progress
from tread_zoo.runtime import autocast, local_device

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

CLASSES = {  # by the model_type of a configuration
    "clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel",
}  # fmt: skip
MOST_TOKENS = 77  # per caption, as in CLIP, unless text_length is set
COLUMNS = ("caption", "captions", "text", "prompt", "txt")  # taken in this order if none is named
_BATCH = 64  # captions that are encoded at a time


class TextEncoder:
    """A text encoder in eval mode, `network`, of a class in `CLASSES`, and its tokenizer. `name` is
    the folder or the name on the hub that both were loaded from."""

    def __init__(self, network: Any, tokenizer: Any, name: str):
        self.network = network.eval().requires_grad_(False)
        self.tokenizer, self.name = tokenizer, name
        positions = getattr(network.config, "max_position_embeddings", None)  # T5 has none
        self.max_length = int(min(positions or 512, tokenizer.model_max_length))

    @property
    def metadata(self) -> dict[str, Any]:
        """The network's class and a hash of its weights: the same wherever it was loaded from."""
        sha256 = digest_weights(self.network)
        return {"class": type(self.network).__name__, "sha256": sha256}

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return each text's number of embeddings; no text is cut."""
        return [len(ids) for ids in self.tokenizer(list(texts), verbose=False).input_ids]

    @torch.no_grad()
    def encode(self, texts: Sequence[str], length: int, precision: str = "fp32") -> Tensor:
        """Return contexts float32 [B, T, S] of B texts on the CPU: T = `length` embeddings of width
        S, computed in fp32, bf16 or fp16 (`precision`). Longer texts are cut."""
        device = next(self.network.parameters()).device
        tokens = self.tokenizer(
            ["", *texts], padding="max_length", truncation=True, max_length=length,
            return_tensors="pt",
        ).to(device)  # fmt: skip
        mask = tokens.attention_mask
        with autocast(device, precision):
            states = self.network(tokens.input_ids, attention_mask=mask).last_hidden_state
        states = states.float() * mask[..., None]
        return (states[1:] - states[:1]).cpu()


def load_text_encoder(name: str) -> TextEncoder:
    """Return the text encoder in a folder or under a name on the hub, on the CPU in float32. From a
    diffusers pipeline, its `text_encoder` is taken.

    Raises:
        ValueError: transformers is not installed, the class is not in `CLASSES`, or weights are
            missing.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"text_encoder={name!r} needs transformers: pip install 'tread-zoo[text]'."
        ) from None
    path = Path(name).expanduser()
    where = str(path.resolve()) if path.is_dir() else name
    folders = {"network": "", "tokenizer": ""}
    try:
        config = transformers.AutoConfig.from_pretrained(where)
    except (OSError, ValueError):
        folders = {"network": "text_encoder", "tokenizer": "tokenizer"}
        config = transformers.AutoConfig.from_pretrained(where, subfolder="text_encoder")
    if config.model_type not in CLASSES:
        raise unknown_name(f"text_encoder={name!r}: model_type", config.model_type, CLASSES)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # else it lists CLIP's image half
    try:
        network, report = getattr(transformers, CLASSES[config.model_type]).from_pretrained(
            where, subfolder=folders["network"], use_safetensors=True, dtype=torch.float32,
            output_loading_info=True,
        )  # fmt: skip
    finally:
        transformers.logging.set_verbosity(verbosity)
    if report["missing_keys"]:
        raise ValueError(
            f"text_encoder={name!r} has no weights for {', '.join(sorted(report['missing_keys']))}."
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, subfolder=folders["tokenizer"])
    return TextEncoder(network, tokenizer, where)


# Captions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captions:
    """The captions of a table's rows. The table has a single column.

    A cell in it is a text; or a list of texts, of which the first is taken; or {"path": …}, where
    the path is a text file's. If `key` is set, a cell is a JSON object that has the caption under
    this key.
    """

    table: "datasets.Dataset"
    key: str = ""

    def __getitem__(self, row: int) -> str:
        """Return the caption of a row; "" if it has none. Raises ValueError if it is not a text."""
        (value,) = self.table[row].values()
        if isinstance(value, dict):
            file = Path(value["path"])
            value = file.read_text(encoding="utf-8") if file.exists() else ""
        elif self.key:
            value = _object(value).get(self.key)
        if isinstance(value, list | tuple):
            value = next(iter(value), "")
        if not isinstance(value, str | None):
            raise ValueError(f"the caption of row {row} is {value!r}, no text.")
        return (value or "").strip()


def find_captions(
    table: "datasets.Dataset", name: str, column: str | None, used: Collection[str]
) -> str | None:
    """Return the name of the column with captions, which is also logged, or None.

    Args:
        table: the table.
        name: name of the data, for the log.
        column: the column, if it is known. None takes the first of `COLUMNS` that exists and has
            texts.
        used: columns with other contents, in which no captions are sought.

    Raises:
        ValueError: `column` does not exist.
    """
    if column is not None and column not in table.features:
        raise unknown_name("data.caption_column", column, table.features)
    texts = [c for c, kind in table.features.items() if c not in used and _is_text(kind)]
    chosen = column or next((c for c in COLUMNS if c in texts), None)
    if chosen:
        text = "captions  %s: in %r; data.text_encoder=… makes contexts of them"
        logger.info(text, name, chosen)
    return chosen


def caption_shape(
    data: ImageData, encoder: TextEncoder, length: int | None, *, shown: bool = True
) -> tuple[int, int]:
    """Return (T, S) of the contexts for the captions, T embeddings of width S, and log how many
    captions are empty or cut (at level DEBUG if not `shown`). For `length` see `with_contexts`.

    Raises:
        ValueError: there are no captions, or there are contexts already.
    """
    if data.context or getattr(data.train, "captions", None) is None:
        what = "contexts already" if data.context else "no captions"
        raise ValueError(
            f"text_encoder={encoder.name!r}, but {data.name} has {what}: captions are cat.txt "
            "beside cat.png, or a column that data.caption_column names."
        )
    counts, empty = list[int](), 0
    for part in data.parts.values():
        for start in range(0, len(part), 1000):
            texts = [_caption(part, i) for i in range(start, min(start + 1000, len(part)))]
            counts += encoder.count_tokens(texts)
            empty += texts.count("")
    chosen = min(length or min(max(counts), MOST_TOKENS), encoder.max_length)
    cut = sum(count > chosen for count in counts)
    logger.log(
        logging.INFO if shown else logging.DEBUG,
        "%-9s %d captions, %d of them empty; %d embeddings each (text_length), %d are cut",
        "text", len(counts), empty, chosen, cut,
    )  # fmt: skip
    return chosen, encoder.encode(["a"], chosen).shape[-1]


@dataclass(eq=False)
class CaptionedImages(Dataset[Any]):
    """Images whose items have the contexts of their captions in the place of labels.

    Args:
        images: a data set whose items have captions.
        numbers: index of each caption in `contexts`.
        contexts: float16 [number of captions, T, S], T embeddings of width S for each caption.
            None: items have the captions themselves.
    """

    images: Any
    numbers: dict[str, int]
    contexts: Tensor | None

    @property
    def digest(self) -> str:
        """Digest of images and captions. Contexts are left out, because they differ a little from
        one kind of hardware to another."""
        return "" if self.contexts is None else digest_items(replace(self, contexts=None))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (image, context). Raises ValueError if the image or its caption cannot be read."""
        caption = self.images.caption(index)
        if caption not in self.numbers:
            raise ValueError("its caption has changed since the start.")
        image = self.images[index][0]
        if self.contexts is None:
            return image, caption
        return image, self.contexts[self.numbers[caption]]

    def item_name(self, index: int) -> str:
        """Return the name of item `index` for logs."""
        return str(self.images.item_name(index))

    def stored(self, index: int) -> bytes:
        """Return the content of the file of picture `index`."""
        content: bytes = self.images.stored(index)
        return content


def with_contexts(data: ImageData, name: str, length: int | None) -> ImageData:
    """Return data whose items have the contexts of their captions in the place of labels.

    Contexts are computed on this process's device. A file in the cache folder, named after
    captions, encoder and shape, keeps them for all processes of a machine and for later runs.

    Args:
        data: images with captions.
        name: see `load_text_encoder`.
        length: embeddings per caption; None takes the longest caption's number, at most 77.

    Raises:
        ValueError: see `load_text_encoder` and `caption_shape`.
    """
    encoder = load_text_encoder(name)
    shape = caption_shape(data, encoder, length)
    texts = sorted({_caption(part, i) for part in data.parts.values() for i in range(len(part))})
    key = hashlib.sha256(json.dumps([encoder.metadata, shape, texts]).encode()).hexdigest()
    file = cache_folder() / f"contexts-{key[:16]}.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.exists():
            encoder.network.to(local_device())
            with atomic_file(file) as stream:
                for start in progress("captions", range(0, len(texts), _BATCH), " batches"):
                    contexts = encoder.encode(texts[start : start + _BATCH], shape[0])
                    stream.write(as_bytes(as_half(contexts)))
    size = len(texts) * math.prod(shape)
    contexts = torch.from_file(str(file), size=size, dtype=torch.float16).view(-1, *shape)
    numbers = {text: number for number, text in enumerate(texts)}
    captioned: dict[str, Any] = {
        name: CaptionedImages(part, numbers, contexts) for name, part in data.parts.items()
    }
    return replace(
        data, **captioned, num_classes=0, class_names=(), context=shape,
        text_encoder={"name": encoder.name, **encoder.metadata},
    )  # fmt: skip


def _caption(part: Any, index: int) -> str:
    """Return the caption of item `index` of the data set `part`. If it cannot be read, return "";
    reading the item will report that."""
    try:
        return str(part.caption(index))
    except ValueError:
        return ""


def caption_key(table: "datasets.Dataset", wanted: str | None) -> str:
    """Return the key under which the JSON objects in a table's column `json` have captions. It is
    `wanted` or, if that is None, the first of `COLUMNS` that is a key in the first row with JSON;
    "" if there is none. Raises ValueError if `wanted` is not a key in that row."""
    rows = table["json"] if "json" in table.features else ()
    keys = next((found for text in rows if (found := _object(text))), {})
    if wanted is not None and wanted not in keys:
        raise unknown_name("data.caption_column", wanted, keys)
    return wanted or next((name for name in COLUMNS if name in keys), "")


def _object(text: str | None) -> dict[str, Any]:
    value = json.loads(text or "{}")
    return value if isinstance(value, dict) else {}


def _is_text(kind: Any) -> bool:
    """Return whether a column of type `kind` has texts, lists of texts, or paths of text files."""
    if isinstance(kind, dict):
        return set(kind) == {"path"}
    return str(getattr(getattr(kind, "feature", kind), "dtype", "")) in ("string", "large_string")
