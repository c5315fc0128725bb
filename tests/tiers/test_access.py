"""What a store makes on disk is its user's, and what it opens is its own."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtier
from kvtier.tiers.access import make_directory, open_file, read_file, replace_file
from kvtier.tiers.slab.inspection import inspect
from small_stores import SMALL, numbered_key, random_payload

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = ("slab", "journal", "lock")
PACKAGE = Path(kvtier.__file__).parent


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    assert tmp_path.is_dir(), "made before"
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def use(path: Path, **settings: Any) -> None:
    """Put a chunk, rewrite the journal, and find the chunk again."""
    for _ in range(2):
        with kvtier.open(path, **{**SMALL, **settings}) as store:
            assert store.put([numbered_key(0)], [random_payload(0)], until="disk").result(20).ok
            store._core.paths[0].tier.compactor.compact()


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("access", "file", "directory"), [("owner", 0o600, 0o700), ("group", 0o660, 0o2770)])
def test_files_are_their_users_whatever_the_umask(
    tmp_path: Path, access: str, file: int, directory: int
) -> None:
    path = tmp_path / "made" / "too"
    use(path, access=access)
    assert {name: mode_of(path / name) for name in FILES} == dict.fromkeys(FILES, file)
    assert {p.name for p in path.iterdir()} == set(FILES)
    assert mode_of(path) == mode_of(path.parent) == directory


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "store"
    use(path)
    path.chmod(0o755)
    for name in FILES:
        (path / name).chmod(0o640)
    use(path, access="group")
    assert {name: mode_of(path / name) for name in FILES} == dict.fromkeys(FILES, 0o640)
    assert mode_of(path) == 0o755


@pytest.mark.parametrize("name", [*FILES, "journal.new"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe"])
def test_links_are_not_followed_out_of_the_directory(tmp_path: Path, name: str, kind: str) -> None:
    path, outside = tmp_path / "store", tmp_path / "outside"
    use(path)
    place = path / name
    if place.exists():
        place.rename(outside)
    else:
        outside.write_bytes(b"precious")
    before = outside.read_bytes()
    if kind == "directory":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(kvtier.TierUnavailable, match=f"{name} is (a symbolic link|not a file).*remove it"):
        kvtier.open(path, **SMALL)
    assert outside.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "device")
    use(tmp_path / "store")
    assert (tmp_path / "device" / "slab").exists()


@pytest.mark.parametrize("name", ["journal", "slab"])
def test_inspection_follows_no_link_either(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    use(path)
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(kvtier.TierUnavailable, match="symbolic link"):
        inspect(path)


def test_a_rewrite_is_not_led_astray_while_running(tmp_path: Path) -> None:
    """A link that somebody puts where the journal's new copy goes is replaced, not followed."""
    path, precious = tmp_path / "store", tmp_path / "precious"
    precious.write_bytes(b"precious")
    with kvtier.open(path, **SMALL) as store:
        (path / "journal.new").symlink_to(precious)
        store._core.paths[0].tier.compactor.compact()
        assert store.put([numbered_key(0)], [random_payload(0)], until="disk").result(20).ok
    assert precious.read_bytes() == b"precious"
    with kvtier.open(path, **SMALL) as store:
        assert store.match([numbered_key(0)]) == 1


def test_files_by_themselves(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        open_file(file, os.O_RDONLY)
    os.close(open_file(file, os.O_WRONLY | os.O_CREAT, 0o640))
    assert mode_of(file) == 0o640
    file.write_bytes(b"0123456789")
    assert read_file(file, 4) == b"0123"
    assert read_file(file, 1 << 60) == b"0123456789"
    os.close(replace_file(file, os.O_WRONLY, 0o600))
    assert (file.read_bytes(), mode_of(file)) == (b"", 0o600)
    with pytest.raises(FileExistsError):
        make_directory(file, 0o700)


def _modules() -> Iterator[tuple[str, ast.AST]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield str(file.relative_to(PACKAGE)), node


def test_no_pickle_anywhere() -> None:
    """What reads files of others into objects runs their code: none of it is imported or asked for."""
    forbidden = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "dbm"}
    found = []
    for file, node in _modules():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{file}: {name}" for name in names if name.partition(".")[0] in forbidden]
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "allow_pickle" in given:
                found.append(f"{file}: {called}(allow_pickle=...)")
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if called == "load" and isinstance(owner, ast.Name) and owner.id == "torch":
                only = given.get("weights_only")
                if not (isinstance(only, ast.Constant) and only.value is True):
                    found.append(f"{file}: torch.load without weights_only=True")
            if called in ("eval", "exec") and isinstance(node.func, ast.Name):
                found.append(f"{file}: {called}")
    assert not found
