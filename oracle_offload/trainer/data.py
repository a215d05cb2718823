"""The samples of a local folder or JSONL file: texts, or images with their captions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .settings import SettingsError

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class Sample:
    """One text, or one image and its caption."""

    text: str
    image: Path | None = None


def read_samples(path: str, images: bool) -> list[Sample]:
    """Return the samples of a folder or a JSONL file, in the order of names or lines.

    Parameters
    ----------
    path : str
        A folder, or a file with one JSON object a line.
    images : bool
        Whether samples are images.

    Raises
    ------
    SettingsError
        There is nothing there, or a line is no sample: which, and why.
    """
    where = Path(path)
    if where.is_dir():
        samples = _of_folder(where, images)
    elif where.is_file():
        samples = _of_lines(where, images)
    else:
        raise SettingsError(f"{path} is neither a folder nor a file")
    if not samples:
        what = f"images ({', '.join(IMAGES)})" if images else "texts (.txt)"
        raise SettingsError(f"{path} holds no {what}")
    return samples


def _of_folder(folder: Path, images: bool) -> list[Sample]:
    files = sorted(folder.iterdir())
    if not images:
        return [Sample(_read(file)) for file in files if file.suffix == ".txt"]
    samples = []
    for file in files:
        if file.suffix.lower() in IMAGES:
            caption = file.with_suffix(".txt")
            samples.append(Sample(_read(caption) if caption.exists() else "", file))
    return samples


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")  # editors on Windows write a mark of the encoding
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8: {error}; save it as UTF-8") from error


def _of_lines(file: Path, images: bool) -> list[Sample]:
    samples = []
    # Not splitlines: it would also end a line at U+2028, which a JSON text may have in it.
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"{file}, line {number}: not JSON: {error}") from error
        text = row.get("text", "" if images else None) if isinstance(row, dict) else None
        image = row.get("image") if isinstance(row, dict) else None
        if not isinstance(text, str) or (images and not isinstance(image, str)):
            wanted = '{"image": "FILE", "text": "..."}' if images else '{"text": "..."}'
            raise SettingsError(f"{file}, line {number}: it is not like {wanted}")
        samples.append(Sample(text, file.parent / str(image) if images else None))
    return samples
