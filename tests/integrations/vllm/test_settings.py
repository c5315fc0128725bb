"""The tier's settings, versions and weights: what needs no vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.config import GIB, MIB
from kvtier.errors import InvalidRequest, TierUnavailable
from kvtier.integrations.vllm import compat, weights
from kvtier.integrations.vllm.settings import Rank, TierSettings, connector_settings, tier_settings
from kvtier.integrations.vllm.weights import weights_digest

if TYPE_CHECKING:
    from pathlib import Path


def parsed(replica: int = 0, replicas: int = 1, **config: Any) -> TierSettings:
    return tier_settings(config, row_bytes=MIB, replica=replica, replicas=replicas)


def test_two_settings_suffice() -> None:
    settings = parsed(paths="/nvme/kv", capacity="16GiB")
    assert settings.store.capacity == 16 * GIB
    assert (settings.store.dram, settings.store.chunk_bytes, settings.store.landing) == (0, MIB, 64 * MIB)
    assert settings.store.on_incompatible == "discard"
    assert settings.lend
    assert not settings.keep_after_reset


def test_the_environment_comes_before_the_tiers_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_DRAM", "2GiB")
    monkeypatch.setenv("KVTIER_CAPACITY", "1GiB")
    assert parsed(paths="/kv").store.dram == 2 * GIB
    assert parsed(paths="/kv", capacity="2GiB").store.capacity == 2 * GIB


def test_data_parallel_engines_have_directories_of_their_own() -> None:
    settings = parsed(replica=1, replicas=2, paths=["/a", "/b"], capacity="16GiB")
    assert [str(path) for path in settings.store.paths] == ["/a/dp1", "/b/dp1"]
    assert settings.store.capacity == 8 * GIB


def test_the_connector_needs_no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    settings = connector_settings({})
    store = settings.store_of(Rank(0, 1, 0, 1, 0, 1), MIB)
    assert store.paths == (tmp_path / "kvtier" / "vllm",)
    assert (store.capacity, store.dram, store.chunk_bytes) == (16 * GIB, GIB, MIB)
    assert store.on_incompatible == "discard"
    assert settings.recompute_if_faster
    assert [settings.tokens_of_chunk(block) for block in (16, 128, 96, 512)] == [128, 128, 192, 512]


def test_workers_share_capacity_and_dram(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = connector_settings({"paths": ["/a", "/b"], "capacity": "16GiB", "dram": "8GiB"})
    store = settings.store_of(Rank(1, 2, 0, 1, 3, 4), MIB)
    assert [str(path) for path in store.paths] == ["/a/dp1-tp3", "/b/dp1-tp3"]
    assert (store.capacity, store.dram) == (2 * GIB, GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    unsaid = connector_settings({"paths": "/a"}).store_of(Rank(0, 1, 1, 2, 1, 2), MIB)
    assert (str(unsaid.paths[0]), unsaid.capacity, unsaid.dram) == ("/a/pp1-tp1", 4 * GIB, GIB)


def test_a_small_disk_is_filled_by_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever of it has been filled before, also by other workers."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=6 * MIB))
    settings = connector_settings({"paths": str(tmp_path / "kv")})
    assert settings.store_of(Rank(0, 1, 0, 1, 1, 2), 4096).capacity == 3 * MIB // 2
    (tmp_path / "kv" / "tp0").mkdir(parents=True)
    (tmp_path / "kv" / "tp0" / "slab").write_bytes(b"x" * 2 * MIB)
    assert settings.store_of(Rank(0, 1, 0, 1, 1, 2), 4096).capacity == 2 * MIB


def test_the_environment_comes_before_the_connectors_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PATHS", "/elsewhere")
    monkeypatch.setenv("KVTIER_CAPACITY", "2GiB")
    monkeypatch.setenv("KVTIER_DRAM", "512MiB")
    store = connector_settings({}).store_of(Rank(0, 1, 0, 1, 1, 2), MIB)
    assert (str(store.paths[0]), store.capacity, store.dram) == ("/elsewhere/tp1", GIB, 256 * MIB)


def test_a_replica_that_vllm_does_not_count_has_a_directory_of_its_own() -> None:
    """Engines of a dense model think that they are alone, and differ in their index only."""
    assert [Rank(index, 1, 0, 1, 0, 1).directory for index in range(3)] == ["", "dp1", "dp2"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chunk_token": 1}, "unknown setting 'chunk_token' of KvtierConnector; did you mean 'chunk_tokens'"),
        ({"lend": True}, "unknown setting 'lend' of KvtierConnector"),
        ({"chunk_bytes": 1}, "not for you to set: vLLM's blocks decide it .see 'chunk_tokens'"),
        ({"chunk_tokens": "256"}, "'chunk_tokens' of KvtierConnector is '256', needs a whole number"),
        ({"chunk_tokens": True}, "'chunk_tokens' of KvtierConnector is True, needs a whole number"),
        ({"chunk_tokens": 0}, "'chunk_tokens' of KvtierConnector is 0, needs to be at least 1"),
        ({"recompute_if_faster": 1}, "needs true or false"),
        ({"capacity": "lots"}, "capacity"),
    ],
)
def test_wrong_settings_of_the_connector_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        connector_settings(config)


def test_chunks_are_whole_blocks() -> None:
    with pytest.raises(InvalidRequest, match="is 100, needs a multiple of the 16 tokens of vLLM's blocks"):
        connector_settings({"chunk_tokens": 100}).tokens_of_chunk(16)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"paths": "/kv", "capacty": 1},
            "unknown setting 'capacty' of the kvtier tier; did you mean 'capacity'",
        ),
        ({"paths": "/kv", "zzz": 1}, "known: paths, capacity"),
        ({"paths": "/kv", "chunk_bytes": 1}, "not for you to set: vLLM's blocks decide it"),
        ({"capacity": "1GiB"}, "no 'paths': give a directory on each disk"),
        ({"paths": "", "capacity": "1GiB"}, "needs the disk tier's directory"),
        ({}, "no 'paths': give a directory on each disk"),
        ({"paths": "/kv", "capacity": "many"}, "needs bytes of at least 0, or a size like '64GiB'"),
        ({"paths": "/kv", "lend": "no"}, "'lend' of the kvtier tier is 'no', needs true or false"),
        ({"paths": "/kv", "model_id": 7}, "'model_id' of the kvtier tier is 7, needs a string"),
        ({"paths": "/kv", "locality": "near"}, "'locality' is 'near', needs 'LOCAL' or 'REMOTE'"),
    ],
)
def test_wrong_settings_are_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(**config)
    assert says in str(refused.value)


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.1+cpu"])
def test_supported_versions(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.3.2", "0.30.0", "0.33.0", "dev"])
def test_another_version_says_which_are_supported(version: str) -> None:
    with pytest.raises(TierUnavailable, match=r"works with 0\.29 and 0\.32: install one of these"):
        compat.check_version(version)


def test_the_entry_point_loads_nothing_heavy() -> None:
    code = (
        "import sys, kvtier.integrations.vllm.plugin; "
        "assert not {'torch', 'vllm'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def model(path: Path, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model": str(path), "model_weights": "", "revision": None, **more})


def test_weights_differ_by_any_byte_and_not_by_their_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100_000))
        (tmp_path / name / "README.md").write_text(name)
    digest = weights_digest(model(tmp_path / "a"))
    assert weights_digest(model(tmp_path / "b")) == digest
    with (tmp_path / "b/model.safetensors").open("r+b") as file:
        file.seek(77_777)
        file.write(b"x")
    assert weights_digest(model(tmp_path / "b")) != digest


def test_large_weights_are_sampled_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SAMPLE_ABOVE", 1000)
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(40 * MIB)
    digests = {weights_digest(model(tmp_path))}
    for offset in (0, 16 * MIB, 32 * MIB + 200_000, 40 * MIB - 1):
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(b"x")
        digests.add(weights_digest(model(tmp_path)))
    assert len(digests) == 5


def test_weights_that_are_not_here_need_a_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no weight files"):
        weights_digest(model(tmp_path))
    with pytest.raises(InvalidRequest, match="come from s3://somewhere: set kvtier's 'model_id'"):
        weights_digest(model(tmp_path, model_weights="s3://somewhere"))
