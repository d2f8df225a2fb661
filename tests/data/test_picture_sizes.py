"""The size of a picture as it is seen, told by its header alone."""

import struct
import zlib

import pytest
import torch
from PIL import Image, PngImagePlugin

from tread_zoo.data import image_folder
from tread_zoo.data.pictures import picture_size, read_picture

XMP = 'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"'


def chunk(kind, content):
    """Return a chunk of a PNG file: length, kind, content, checksum."""
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def png(height, width, *, ahead=b"", behind=b""):
    """Return a grey PNG, written by hand, with chunks ahead of its pixels and behind them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(height * (width + 1))))
    return b"\x89PNG\r\n\x1a\n" + header + ahead + pixels + behind + chunk(b"IEND", b"")


def exif(orientation):
    """Return an eXIf chunk with one tag: big-endian TIFF, tag 0x0112, of type SHORT."""
    tag = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    return chunk(b"eXIf", b"MM\x00*\x00\x00\x00\x08\x00\x01" + tag + bytes(4))


TEXT = chunk(b"tEXt", b"date:create\x002026")
XMP_TEXT = chunk(b"iTXt", b"XML:com.adobe.xmp\x00\x00\x00\x00\x00" + XMP.encode())


@pytest.mark.parametrize(
    ("chunks", "size"),
    [
        ({}, (2, 4)),
        ({"ahead": exif(6)}, (4, 2)),
        ({"ahead": exif(3)}, (2, 4)),
        ({"ahead": XMP_TEXT}, (4, 2)),
        ({"behind": exif(6)}, (4, 2)),
        ({"behind": TEXT + exif(6)}, (4, 2)),
        ({"behind": TEXT}, (2, 4)),
        ({"behind": XMP_TEXT}, (4, 2)),
        ({"ahead": exif(3), "behind": exif(6)}, (4, 2)),
    ],
)
def test_a_png_is_as_large_as_it_is_read(chunks, size):
    content = png(2, 4, **chunks)
    assert picture_size(content, "a.png") == size
    assert tuple(read_picture(content, "a.png", None, 1).shape[1:]) == size


@pytest.mark.parametrize("chunks", [{}, {"ahead": exif(6)}, {"behind": TEXT}])
def test_no_png_is_decoded_for_its_size(chunks, monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    content = png(2, 4, **chunks)
    expected = picture_size(content, "a.png")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    assert picture_size(content, "a.png") == expected
    assert picture_size(png(4, 4, behind=exif(6)), "square.png") == (4, 4)


def test_a_png_with_a_good_header_and_cut_pixels_is_left_to_the_loader(tmp_path):
    pixels = torch.randint(256, (40, 20), dtype=torch.uint8).numpy()
    for name in ("a", "b", "c"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    cut = tmp_path / "b.png"
    cut.write_bytes(cut.read_bytes()[:200])
    data = image_folder(str(tmp_path), channels=1, held_out=0.0)
    assert data.image_size == (40, 20)
    assert data.train[0][0].shape == (1, 40, 20)
    with pytest.raises(ValueError, match=r"b.png' cannot be read"):
        data.train[1]
