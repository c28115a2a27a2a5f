"""Images: found by their headers, faulty ones left out, and pixels determined by a key."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.image_folders import COLOURS, class_folder, picture
from weft.data.media import images as pixels_module
from weft.data.media.class_folder import ClassFolder, find_pictures
from weft.data.media.images import Look, read_picture
from weft.errors import DataError, MissingExtra


def test_classes_are_folders_sorted_by_name(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "pictures")
    (root / ".hidden").mkdir()
    (root / "red" / "notes.txt").write_text("no picture")
    (root / "red" / "deeper").mkdir()
    picture(COLOURS["red"], 0).save(root / "red" / "deeper" / "x.PNG")
    seen = []
    found = find_pictures(root, lambda done, total: seen.append((done, total)))
    assert found.classes == ("blue", "green", "red")
    assert [found.labels.count(label) for label in range(3)] == [6, 6, 7]
    assert found.file(18).name == "x.PNG"
    assert seen[-1] == (19, 19)
    assert ClassFolder.parse(found.format()) == found
    assert found.part([0, 18]).paths == ("blue/0.png", "red/deeper/x.PNG")


def bomb(path: Path, width: int, height: int) -> None:
    """Write a PNG of a few bytes whose header declares many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_unreadable_images_are_left_out_with_a_reason(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "pictures", 200)
    bomb(root / "red" / "bomb.png", 20_000, 20_000)
    (root / "red" / "empty.png").write_bytes(b"")
    (root / "red" / "text.jpg").write_text("this is no picture")
    (tmp_path / "outside.png").write_bytes((root / "red" / "0.png").read_bytes())
    (root / "red" / "link.png").symlink_to(tmp_path / "outside.png")
    found = find_pictures(root)
    assert len(found.paths) == 600
    reasons = "\n".join(found.unreadable)
    assert "bomb.png: it has more than 100,000,000 pixels. Make it smaller, or delete it." in reasons
    assert "link.png: it links out of the folder" in reasons
    assert "text.jpg: it cannot be read as an image" in reasons
    assert len(found.unreadable) == 4


def one_class(root: Path) -> None:
    (root / "only").mkdir(parents=True)


def empty_class(root: Path) -> None:
    class_folder(root)
    (root / "zebra").mkdir()


def many_bad(root: Path) -> None:
    class_folder(root)
    (root / "red" / "bad.png").write_bytes(b"x")


REFUSED = {
    "there is no such folder. Give one that has a folder of pictures for each class.": lambda root: None,
    "its folders are the classes, and it has 1. Give a folder with 2 or more.": one_class,
    "class 'zebra' has no picture. Add some, or take the folder away.": empty_class,
    "1 of 19 images cannot be read, more than 1%. The first: ": many_bad,
}


@pytest.mark.parametrize("text", REFUSED)
def test_unusable_folder_is_refused(tmp_path: Path, text: str) -> None:
    REFUSED[text](tmp_path / "pictures")
    with pytest.raises(DataError) as caught:
        find_pictures(tmp_path / "pictures")
    assert str(caught.value).startswith(f"data={tmp_path / 'pictures'}: {text}")


def test_pixels_are_determined_by_the_key(tmp_path: Path) -> None:
    ramp = np.arange(64 * 48 * 3, dtype=np.uint32).reshape(48, 64, 3) % 251
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "x.png")
    look = Look(16, crops=True, mirrors=True)
    first, again, other = (read_picture(tmp_path / "x.png", look, key) for key in ((1, 2), (1, 2), (1, 3)))
    assert first.shape == (3, 16, 16)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    middle = read_picture(tmp_path / "x.png", Look(48))
    assert np.array_equal(middle, ramp.transpose(2, 0, 1)[:, :, 8:56])  # no random crop, and no resizing
    mirrored = [read_picture(tmp_path / "x.png", Look(48, mirrors=True), (key,)) for key in range(20)]
    assert 4 < sum(np.array_equal(one, middle[:, :, ::-1]) for one in mirrored) < 16


KINDS = {
    "grey": lambda red: red.convert("L"),
    "palette": lambda red: red.convert("P"),
    "cmyk": lambda red: red.convert("CMYK"),
    "transparent": lambda red: Image.merge("RGBA", (*red.split(), Image.new("L", red.size, 128))),
    "16 bits": lambda red: Image.fromarray(np.full((16, 20), 40_000, np.uint16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_mode_gives_three_channels(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.tif" if kind == "cmyk" else "x.png")
    KINDS[kind](picture((220, 30, 40), 0)).save(path)
    found = read_picture(path, Look(8))
    assert found.shape == (3, 8, 8)
    expected = {"grey": (88, 88, 88), "transparent": (237, 142, 147), "16 bits": (155, 155, 155)}
    assert np.abs(found.mean((1, 2)) - expected.get(kind, (215, 35, 42))).max() < 12


def test_animation_gives_its_first_frame_and_the_suffix_is_ignored(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (9, 9), colour) for colour in ((200, 0, 0), (0, 0, 200))]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "x.gif").rename(tmp_path / "x.jpg")
    assert read_picture(tmp_path / "x.jpg", Look(8))[0].min() > 150


def test_truncated_image_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    content = (tmp_path / "x.png").read_bytes()
    (tmp_path / "x.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"x\.png: its pixels cannot be decoded \(.*\)\. Repair it, or delete it\."):
        read_picture(tmp_path / "x.png", Look(8))


def test_missing_pillow_error_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r'Pillow is not installed: .* pip install -e "\.\[media\]"'):
        pixels_module.pillow()
