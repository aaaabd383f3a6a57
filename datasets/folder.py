"""Pictures of your own: `folder[path=~/photos]`, a sub-folder for every class, in which pictures lie at any depth.

They may be of any size and mode, and are turned as their EXIF data says, stripped of transparency, and squeezed or
stretched to `size` x `size` pixels in colour; `folder[path=~/photos,size=64,channels=1]` is larger and grey. Classes
are numbered in the order of their names. If `train` and `test` lie at the top, with the classes in them, these are the
official parts; else all pictures are training data. Files that are no pictures by their names are left aside.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedbench.dataset import Arrays, DataError
from fedbench.own_data import Facts, OwnData, OwnParams

PICTURES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The endings that torchvision's ImageFolder knows."""
PARTS = ("train", "test")
OTHER_PARTS = ("val", "valid", "validation", "dev")
LAYOUT = "It needs a sub-folder for every class, or train/ and test/ with these in them."


class FolderParams(OwnParams):
    size: int = Field(32, ge=1, le=1024, description="height and width of the pictures as they are used")
    channels: Literal[1, 3] = Field(3, description="3: colour; 1: grey")


class Folder(OwnData):
    title = "Your own pictures (a folder for each class)"
    Params = FolderParams
    params: ClassVar[FolderParams]

    @classmethod
    def files(cls, path: Path) -> list[Path]:
        return [file for part in _parts(path) for files in _classes(part).values() for file in files]

    @classmethod
    def look(cls) -> Facts:
        names = {name for part in _parts(Path(cls.params.path)) for name in _classes(part)}
        return Facts((cls.params.channels, cls.params.size, cls.params.size), len(names), 0, 255)

    @classmethod
    def decode(cls) -> Arrays:
        parts = [_classes(part) for part in _parts(Path(cls.params.path))]
        names = sorted({name for part in parts for name in part})
        if len(names) < 2:
            raise DataError(f"{cls.params.path} has one class only, {names[0]}.", "At least two classes are needed.")
        samples = [(file, names.index(name)) for part in parts for name, files in part.items() for file in files]
        x = np.empty((len(samples), cls.params.channels, cls.params.size, cls.params.size), dtype=np.uint8)
        for place, (file, _) in enumerate(samples):
            x[place] = _picture(file, cls.params.size, cls.params.channels)
        n_train = sum(len(files) for files in parts[0].values())
        return Arrays(x, np.array([label for _, label in samples], dtype=np.int64), n_train)


def _parts(path: Path) -> list[Path]:
    """The folders whose sub-folders are classes: the official parts, or the folder itself. Raises DataError."""
    if not path.is_dir():
        raise DataError(f"{path} is a file, not a folder.", LAYOUT)
    found = {folder.name for folder in _folders(path)}
    if not found:
        raise DataError(f"{path} has no sub-folders.", LAYOUT)
    if found != {"train"} and not {*PARTS} <= found:
        if "train" in found and (other := found & {*OTHER_PARTS}):
            raise DataError(f"{path} has train and {min(other)}.", "Call the part that clients are tested on `test`.")
        return [path]
    if others := found - {*PARTS}:
        hint = "Move them into these, or give a class that is really called so another name."
        raise DataError(f"{path} has folders beside train and test: {', '.join(sorted(others))}.", hint)
    return [path / part for part in PARTS if part in found]


def _classes(part: Path) -> dict[str, list[Path]]:
    """The pictures of every class, all in order. Raises DataError when a class has none."""
    classes = {folder.name: _pictures(folder) for folder in _folders(part)}
    if not any(classes.values()):
        raise DataError(f"{part} has no pictures in sub-folders.", f"{LAYOUT} Pictures end in {', '.join(PICTURES)}.")
    for name, files in classes.items():
        if not files:
            hint = f"Delete the folder or fill it; pictures end in {', '.join(PICTURES)}."
            raise DataError(f"class {name} has no pictures: {part / name}.", hint)
    return classes


def _folders(path: Path) -> list[Path]:
    folders = (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(folders, key=lambda folder: folder.name)


def _pictures(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error  # else a folder that may not be read would be left out

    return sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder, onerror=fail)
        for name in names
        if name.lower().endswith(PICTURES) and not name.startswith(".")
    )


def _picture(file: Path, size: int, channels: int) -> NDArray[np.uint8]:
    """[channels, size, size]; raises DataError that names the file when it cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            upright = _eight_bits(ImageOps.exif_transpose(opened))
            resized = upright.convert("L" if channels == 1 else "RGB").resize((size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # decoders raise whatever the damage makes them meet
        raise DataError(
            f"the picture {file} cannot be decoded: {error}", "Mend it, or move it out of the folder."
        ) from None
    return np.asarray(resized).reshape(size, size, channels).transpose(2, 0, 1)


def _eight_bits(picture: Any) -> Any:
    """The same with bytes for pixels, where Pillow would cut off all above 255."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits; save it with 8 or 16")
    return picture
