"""The report as a page: all of it, nothing from elsewhere, light and dark."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.cli.accept.charts import Bar, Line, bars, lines
from kvtier.cli.accept.page import page
from kvtier.cli.accept.report import report_data
from kvtier.cli.accept.state import State
from kvtier.cli.accept.verdict import FLAG, Check, Gate, at_least, at_most, measured

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAME = 'array <script>alert("7")</script> & co'


def _rows(factor: float) -> list[dict[str, Any]]:
    return [
        {
            "concurrency": count, "ttft_p50_s": factor * count, "ttft_of_trials": [factor * count, None, 1.0],
            "tokens_per_s": 9 / factor, "tokens_per_s_of_trials": [9 / factor] * 3,
        }
        for count in (2, 4)
    ]  # fmt: skip


def _gates() -> list[Gate]:
    paced = {"p50_ms": 1.0, "p99_ms": 2.5}
    sample = {"rss": 3e8, "descriptors": 20, "threads": 9}
    stretches = [
        {"run": run, "samples": [{**sample, "seconds": 600.0 * run + 20 * i} for i in range(30)]}
        for run in (1, 2)
    ]
    measured_again = [{"seconds": 600.0 * i, "read_gb_s": 2.0, "write_gb_s": 1.0} for i in range(3)]
    arrival = [
        at_least("read", 2.9, 2.7, "GB/s", "3 <b>stated</b>"),
        measured("write", 1.1, "GB/s"),
        Check("capacity reserved", 1.0, FLAG, ">=", 1.0, True),
    ]
    single = [
        measured("cold reads", 2.8, "GB/s"),
        measured("synced writes", None, "GB/s"),
        at_most("p99 of reads under writes", 2.5, 4.0, "ms"),
    ]
    recovery = [
        at_least(f"{what}, {count} at once", 20.0, 25.0, "%")
        for count in (2, 4)
        for what in ("TTFT lower", "throughput higher")
    ]
    rows = {"rows": _rows(1.0), "baseline_rows": _rows(1.5), "baseline": NAME}
    soak = {"seconds": 1800.0, "stretches": stretches, "measured": measured_again}
    return [
        Gate("G1", "Arrival", arrival, {"free": 1}, seconds=65.0),
        Gate("G2", "Single-machine baseline", single, {"mixed": {"rows": [paced, paced]}}),
        Gate("G3", "Main gate", recovery, rows),
        Gate("G4", "Stability", [at_most("broken promises", 1.0, 0.0)], soak, error=NAME),
    ]


@pytest.fixture
def html(tmp_path: Path) -> str:
    with State(tmp_path / "report", {}) as state:
        state.begin({"started": "2026-01-01", "command": "kvtier accept", "cpu": "a", "kernel": NAME})
        state.begin({"started": "2026-01-02", "command": f"kvtier {NAME}", "cpu": "b", "kernel": NAME})
        state.put("target", {"model": NAME, "precision": "float32"})
        return page(report_data(NAME, state, {"tokens": 512, "url": None}, _gates(), ["warning: disk"]))


class _Parser(HTMLParser):
    """Tags that are opened and closed in turn, and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.refers += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_refers_to_nothing_outside(html: str) -> None:
    parser = _Parser()
    parser.feed(html)
    assert parser.open == []
    assert parser.refers == ["#G1", "#G2", "#G3", "#G4"]
    assert not re.search(r"url\(|@import|https?:", html)
    assert "script" not in parser.tags
    assert parser.tags.count("svg") == 8
    assert parser.text.count(NAME) >= 5


def test_every_value_stands_beside_its_limit(html: str) -> None:
    text = re.sub(r"<[^>]+>", "|", html)
    assert re.search(r"read\|+2\.9 GB/s\|+≥ 2\.7 GB/s\|+ok\|+3 &lt;b&gt;stated", text)
    assert re.search(r"TTFT lower, 4 at once\|+20 %\|+≥ 25 %\|+FAILED", text)
    assert re.search(r"broken promises\|+1\|+≤ 0\|+FAILED", text)
    assert re.search(r"capacity reserved\|+yes\|+yes\|+ok", text)
    assert re.search(r"synced writes\|+-\|", text)
    assert "on another cpu" in text
    assert "not accepted" in text


def test_while_gates_are_to_come_it_is_not_finished(tmp_path: Path) -> None:
    with State(tmp_path / "report", {}) as state:
        state.begin({"started": "2026-01-01", "command": "kvtier accept"})
        data = report_data("array", state, {}, _gates()[:2], [])
    assert [gate["outcome"] for gate in data["gates"]] == ["passed", "passed", "not run", "not run"]
    assert data["passed"] is False
    assert '<span class="badge not-run">not finished</span>' in page(data)


def test_a_bar_is_as_long_as_its_value() -> None:
    svg = bars("x", "GB/s", [Bar("a", 1.0), Bar("b", 4.0, limit=2.0), Bar("none", 0.0)])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)"', svg)]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    (limit,) = re.findall(r'<line x1="([\d.]+)"[^>]*class="limit"', svg)
    assert float(limit) == pytest.approx(132 + widths[1] / 2, abs=0.1)


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(0.0, 5.0)], [(0.0, 1e-9), (1e6, 3e12)]])
def test_any_line_can_be_drawn(points: list[tuple[float, float]]) -> None:
    svg = lines("x", "", [Line("a", points)], marks=[0.5])
    places = [float(y) for y in re.findall(r'c[xy]="([-\d.e+]+)"', svg)]
    assert all(0 <= place <= 440 for place in places)
    assert "nan" not in svg


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.timeout(300)
def test_chromium_shows_it_without_a_network(html: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html)
    corners = {}
    for number, scheme in enumerate(("dark", "light")):
        shot = tmp_path / f"{scheme}.png"
        done = _chromium(file, tmp_path, f"--screenshot={shot}", "--window-size=1000,800",
                         f"--blink-settings=preferredColorScheme={number}")  # fmt: skip
        assert "CONSOLE" not in done.stderr
        corners[scheme] = _first_pixel(shot.read_bytes())
    assert corners == {"dark": (0x10, 0x13, 0x18), "light": (0xF6, 0xF7, 0xF9)}
    shown = _chromium(file, tmp_path, "--dump-dom").stdout
    assert shown.count("<svg") == 8
    assert "Storage acceptance" in shown


def _chromium(file: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *options,
         file.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def _first_pixel(png: bytes) -> tuple[int, ...]:
    """Of the first row, where no filter changes it."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    return tuple(zlib.decompressobj().decompress(data, 64)[1:4])
