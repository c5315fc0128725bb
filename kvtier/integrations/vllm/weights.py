"""A digest of a model's weights as they lie on disk: the scheduler, where keys are made, has no model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLE_ABOVE = 20_000_000_000
"""Bytes of weights above which only samples are hashed."""
_SAMPLE_BLOCK = 256 << 10
_SAMPLE_EVERY = 16 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HINT = "set kvtier's 'model_id' to a string that changes whenever they do"


def weights_digest(model_config: Any, download_dir: str | None = None) -> str:
    """Hex digest over name, size and bytes of every weight file of a vLLM ModelConfig.

    `download_dir` is where vLLM keeps what it downloads, the Hugging Face cache unless given. A name is
    the file's own, so a model may be moved. Above 20 GB in total, 256 KiB of every 16 MiB are read, and
    the end of each file.

    Raises InvalidRequest if the files are not on this machine.
    """
    files = _files(model_config, download_dir)
    sampled = sum(file.stat().st_size for file in files) > SAMPLE_ABOVE
    digest = hashlib.sha256(b"sampled" if sampled else b"whole")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0{_file_hash(file, size, sampled)}\n".encode())
    return digest.hexdigest()


def _files(model_config: Any, download_dir: str | None) -> list[Path]:
    if getattr(model_config, "model_weights", ""):
        raise InvalidRequest(f"the weights come from {model_config.model_weights}: {_HINT}")
    place = Path(model_config.model)
    if not place.exists():
        place = _cached(model_config, download_dir)
    if place.is_file():
        return [place]
    files = sorted(file for file in place.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise InvalidRequest(f"there are no weight files ({', '.join(_SUFFIXES)}) in {place}: {_HINT}")
    return files


def _cached(model_config: Any, download_dir: str | None) -> Path:
    """Where the model lies that vLLM has loaded by its name."""
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=download_dir,
            local_files_only=True,
        )
    except Exception as error:
        raise InvalidRequest(
            f"the weights of {model_config.model!r} are not on this machine: {_HINT}"
        ) from error
    return Path(path)


def _file_hash(file: Path, size: int, sampled: bool) -> str:
    hasher = xxhash.xxh3_128()
    with file.open("rb") as stream:
        for start, length in _pieces(size, sampled):
            stream.seek(start)
            hasher.update(stream.read(length))
    return hasher.hexdigest()


def _pieces(size: int, sampled: bool) -> Iterable[tuple[int, int]]:
    if not sampled:
        return ((start, _SAMPLE_EVERY) for start in range(0, size, _SAMPLE_EVERY))
    starts = [*range(0, size, _SAMPLE_EVERY), max(0, size - _SAMPLE_BLOCK)]
    return ((start, _SAMPLE_BLOCK) for start in starts)
