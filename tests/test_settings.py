"""Settings from a file, the environment and keywords."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import FIELDS, GIB, KIB, MIB, StoreConfig
from kvtier.errors import InvalidRequest
from kvtier.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvtier.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (64 * MIB, 64 * MIB),
        ("67108864", 64 * MIB),
        ("64MiB", 64 * MIB),
        ("64 MiB", 64 * MIB),
        ("64mib", 64 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("2GB", 2_000_000_000),
        ("0.25TiB", 256 * GIB),
        ("65536KiB", 64 * MIB),
    ],
)
def test_sizes_are_bytes_or_have_a_unit(given: int | str, nbytes: int) -> None:
    assert load(None, {"dram": given}).dram == nbytes


@pytest.mark.parametrize("name", ["capacity", "dram", "landing", "chunk_bytes", "part_bytes", "io_window"])
def test_every_size_may_have_a_unit(name: str) -> None:
    small = {"chunk_bytes": "64KiB", "part_bytes": "64KiB"}
    config = load("/cache", {**small, name: "1MiB"})
    assert getattr(config, name) == MIB


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dram", "lots"),
        ("dram", "-1GiB"),
        ("dram", -5),
        ("dram", "64XiB"),
        ("dram", None),
        ("dram", ""),
        ("io_threads", "many"),
        ("io_threads", 4.5),
        ("engine", "urin"),
        ("get_timeout", "soon"),
        ("on_incompatible", "ignore"),
        ("paths", 7),
        ("paths", ""),
        ("paths", ["/cache", 7]),
        ("paths", "/ca\0che"),
    ],
)
def test_what_does_not_parse_is_refused_by_name_with_what_it_got(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(None, {name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_parsed_value_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="part_bytes is 98304, needs a power of two"):
        load(None, {"part_bytes": "96KiB"})


def test_a_directory_is_the_path() -> None:
    assert load("/cache", {}).path == Path("/cache")
    assert load(Path("/cache"), {"capacity": "1GiB"}).capacity == GIB
    assert load(None, {}).path is None


def test_several_directories_are_the_paths(tmp_path: Path) -> None:
    both = (Path("/cache"), Path("/other"))
    assert load(["/cache", Path("/other")], {}).paths == both
    assert load(toml(tmp_path, 'paths = ["/cache", "/other"]'), {}).paths == both
    assert load(None, {"paths": "/cache"}).paths == (Path("/cache"),)


def test_a_file_is_toml(tmp_path: Path) -> None:
    path = toml(tmp_path, 'paths = "/cache"\ncapacity = "2GiB"\nio_threads = 3\nget_timeout = 1.5\n')
    config = load(str(path), {})
    assert (config.path, config.capacity) == (Path("/cache"), 2 * GIB)
    assert (config.io_threads, config.get_timeout) == (3, 1.5)
    assert config.engine == "auto"


def test_keywords_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, 'dram = "64MiB"\nlanding = "65MiB"\nio_window = "66MiB"\n')
    monkeypatch.setenv("KVTIER_DRAM", "128MiB")
    monkeypatch.setenv("KVTIER_LANDING", "129MiB")
    config = load(path, {"dram": "256MiB"})
    assert config.dram == 256 * MIB
    assert config.landing == 129 * MIB
    assert config.io_window == 66 * MIB


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "paths": ("/cache:/other", (Path("/cache"), Path("/other"))),
        "check_dram": ("true", True),
        "kind": ("files", "files"),
        "engine": ("threads", "threads"),
        "on_incompatible": ("discard", "discard"),
        "access": ("group", "group"),
        "admission": ("second-touch", "second-touch"),
        "policy": ("s3fifo", "s3fifo"),
        "dram_policy": ("reuse", "reuse"),
        "part_bytes": ("128KiB", 128 * KIB),
        "get_timeout": ("2.5", 2.5),
        "open_timeout": ("2.5", 2.5),
        "put_timeout": ("2.5", 2.5),
        "close_timeout": ("2.5", 2.5),
        "io_threads": ("7", 7),
        "io_depth": ("7", 7),
        "max_queued_chunks": ("7", 7),
        "ttl": ("2.5", 2.5),
        "quotas": ("acme=10GiB, a=b=5MiB", {"acme": 10 * GIB, "a=b": 5 * MIB}),
    }
    text, value = values.get(name, ("8MiB", 8 * MIB))
    monkeypatch.setenv(f"KVTIER_{name.upper()}", text)
    assert getattr(load(None if name == "paths" else "/cache", {}), name) == value


@pytest.mark.parametrize("name", ["policy", "dram_policy"])
def test_an_unknown_policy_is_refused_with_the_nearest_one(name: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^{name} is 's3-fifo', needs one of 'lru', .*; did you mean 's3fifo'"
    ):
        load("/cache", {name: "s3-fifo"})


def test_a_source_comes_before_the_path_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_PATHS", "/other")
    assert load(None, {}).path == Path("/other")
    assert load("/cache", {}).path == Path("/cache")


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidRequest, match="unknown setting 'capasity'; did you mean 'capacity'"):
        load(None, {"capasity": 1})
    with pytest.raises(InvalidRequest, match="unknown setting 'zzz'; known: paths, capacity"):
        load(None, {"zzz": 1})


@pytest.mark.parametrize(("text", "name"), [("drm = 1", "'drm'"), ("[store]\ndram = 1", "'store'")])
def test_an_unknown_name_in_a_file_is_refused(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown setting {name}"):
        load(toml(tmp_path, text), {})


def test_an_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CAPACTIY", "1GiB")
    with pytest.raises(InvalidRequest, match="'KVTIER_CAPACTIY'; did you mean 'KVTIER_CAPACITY'"):
        load(None, {})


def test_a_wrong_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_DRAM", "lots")
    with pytest.raises(InvalidRequest, match=r"dram.*'lots'"):
        load(None, {})


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch_for_the_native_core_is_no_setting(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_NATIVE", value)
    assert load(None, {}).dram == GIB
    with pytest.raises(InvalidRequest, match="unknown setting 'native'"):
        load(None, {"native": 1})


def test_variables_in_lower_case_are_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("kvtier_dram", "128MiB")
    assert load(None, {}).dram == load(toml(tmp_path, 'dram = "1GiB"'), {}).dram


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"dram =\n", "not valid TOML"), (b'dram = "\xff"', "not valid TOML"), (None, "cannot read")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "my.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=message) as caught:
        load(path, {})
    assert str(path) in str(caught.value)


def test_the_store_does_without_pydantic() -> None:
    code = "import sys; import kvtier; print('pydantic' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]


VALUES = st.recursive(
    st.integers() | st.floats() | st.text(max_size=12) | st.booleans() | st.datetimes()
    | st.sampled_from(["1GiB", "-1", "1e400", "\0", "0x10", "nan", "64KiB", 2**63, 10**400, "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def one_error(load_it: Callable[[], StoreConfig]) -> None:
    try:
        config = load_it()
    except InvalidRequest as error:
        message = str(error)
        if len(message) > 1500:
            pytest.fail(f"nobody reads {message}")
    else:
        assert isinstance(config, StoreConfig)


@given(name=st.sampled_from(FIELDS), value=VALUES)
def test_any_value_of_any_setting_is_a_setting_or_refused(name: str, value: Any) -> None:
    one_error(lambda: load(None, {name: value}))


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=3))
def test_any_values_together_are_settings_or_refused(values: dict[str, Any]) -> None:
    one_error(lambda: load(None, values))


NAMES = st.sampled_from(FIELDS) | st.text("abc.-_\"'", max_size=4)
LITERALS = st.sampled_from(
    ['"1GiB"', "1",
     "-1", "1.5", "inf", "nan", "true", "[]", '["/a", 1]', "{}", "1979-05-27", "0o600", '"\\u0000"',
     '"""', "'", "0x_", "1" * 5000, "[" * 3000, "{a=" * 500, "\0", "\ud7ff"]
)  # fmt: skip


@pytest.fixture(scope="module")
def any_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "any.toml"


@given(st.binary(max_size=100) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_a_file_of_any_bytes_is_settings_or_refused(any_toml: Path, data: bytes) -> None:
    any_toml.write_bytes(data)
    one_error(lambda: load(any_toml, {}))


@given(st.lists(st.tuples(NAMES, LITERALS), max_size=4))
def test_a_file_of_any_settings_is_settings_or_refused(any_toml: Path, lines: list[tuple[str, str]]) -> None:
    any_toml.write_text("".join(f"{name} = {literal}\n" for name, literal in lines), encoding="utf-8")
    one_error(lambda: load(any_toml, {}))
