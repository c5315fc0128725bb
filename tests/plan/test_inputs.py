"""Input files: what they may have, where files and overrides go, and what is refused with which words."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.plan import accounting, cases, inputs
from plans import tables, work_out


def build(whole: dict[str, Any], directory: Path = Path()) -> inputs.Inputs:
    return inputs.build(whole, directory)


def changed(text: str) -> dict[str, Any]:
    """A whole plan with a field set as --set does."""
    whole = tables()
    inputs.override(whole, dict([inputs.assignment(text)]), Path())
    return whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "workload.promt_tokens=1",
            "unknown field 'promt_tokens' in .workload.; did you mean 'prompt_tokens'",
        ),
        ("worklod.prompt_tokens=1", "did you mean 'workload'"),
        ("s.disk.bandwith=1", "did you mean 'bandwidth'"),
        ("s.dsk.bandwidth=1", "names no tier; .* has disk"),
        ("money.token_prices=1", "did you mean 'token_price'"),
        ("workload.prompt_tokens=0", "needs a value above 0"),
        ("workload.prompt_tokens=5 GB", "needs a unit such as token"),
        ("s.disk.hit_rate=1.5", "of at least 0 and at most 1"),
        ("s.disk.hit_rate=-0.1", "of at least 0"),
        ("workload.hit_rate=0.5", "is for setups of one tier"),
        ("s.disk.bench=x.json", "either bandwidth, or bench"),
        ("s.disk.bandwidth=0", "above 0"),
        ("s.disk.bandwidth={}", "empty table"),
        ("s.disk.bandwidth={x = 1}", "sessions at once"),
        ("s.disk.name=max", "for something else"),
        ("s.disk.name=my disk", "one of a-z"),
        ("s.disk.price=5 GB", "currency"),
        ("workload.concurrency=[1, 1]", "different numbers"),
        ("workload.concurrency=0", "different numbers"),
        ("workload.concurrency=[]", "different numbers"),
        ("workload.policy=lru", "there is none"),
        ("workload.trace=absent.jsonl", "cannot read"),
        ("money.currency=dollar", "currency is 'dollar'|unknown unit 'dollar'"),
        ("money.exchange.CNY=0", "above 0"),
        ("money.token_price=2 CNY/Mtoken", "needs a unit such as USD"),
        ("model.layers=x", "needs a whole number"),
        ("given.x=true", "needs a text"),
        ("given.x=fast", "needs a number"),
        ("derived.x=1", "needs a table"),
        ("derived.x.formula=a b", "cannot be read"),
        ("version.x=1", "no field of a table"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        work_out(changed(text))


@pytest.mark.parametrize("text", ["workload", "workload=1", "hit_rate=1"])
def test_an_assignment_names_a_section(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--set"):
        inputs.assignment(text)


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidRequest, match="reads version = 1"):
        build({"version": version})


def test_overrides_take_the_place_of_what_is_there() -> None:
    whole = tables()
    given = "workload.prompt_tokens=100", "s.disk.bandwidth=1GB/s", "given.x=3 s", "money.exchange.CNY=7"
    values = dict(map(inputs.assignment, given))
    inputs.override(whole, values, Path())
    sheet = work_out(whole)
    found = [
        sheet.get(name) for name in ("prompt_tokens", "s.at_8.disk.bandwidth", "given.x", "exchange.CNY")
    ]
    assert found == [100, 1, 3, 7]


def test_files_are_looked_for_beside_the_plan_and_overrides_where_they_were_given(tmp_path: Path) -> None:
    speeds = {"fio": 9.0, "kvtier-uring": 2.0, "kvtier-threads": 3.0, "kvtier-uring-unchecked": 4.0}
    bench = {"rows": [{"name": name, "gb_s": speed} for name, speed in speeds.items()]}
    for directory in ("plans", "here"):
        (tmp_path / directory).mkdir()
    (tmp_path / "plans" / "bench.json").write_text(json.dumps(bench))
    bench["rows"][2]["gb_s"] = 5.0
    (tmp_path / "here" / "bench.json").write_text(json.dumps(bench))
    whole = tables({"name": "disk", "bench": "bench.json", "hit_rate": 1})
    sheet = work_out(whole, tmp_path / "plans")
    assert sheet.get("s.at_8.disk.bandwidth") == 3
    assert sheet.figures["s.at_8.disk.bandwidth"].source == "bench.json, row kvtier-threads"
    inputs.override(whole, {"s.disk.bench": "bench.json"}, tmp_path / "here")
    assert work_out(whole, tmp_path / "plans").get("s.at_8.disk.bandwidth") == 5
    inputs.override(whole, {"s.disk.row": "fio"}, tmp_path)
    assert work_out(whole, tmp_path / "plans").get("s.at_8.disk.bandwidth") == 9
    inputs.override(whole, {"s.disk.row": "dd"}, tmp_path)
    with pytest.raises(InvalidRequest, match="no row 'dd'; its rows are fio"):
        work_out(whole, tmp_path / "plans")


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"rows": [{"name": "a"}]}', "{", '{"rows": [{"name": "a", "gb_s": 0}]}']
)
def test_a_bench_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"b\.json"):
        work_out(tables({"name": "disk", "bench": "b.json", "row": "a", "hit_rate": 1}), tmp_path)


def test_a_hit_curve_gives_each_tier_what_those_above_do_not_have(tmp_path: Path) -> None:
    rows = [{"policy": "lru", "capacity_chunks": n, "hit_rate": r} for n, r in ((100, 0.2), (1000, 0.5))]
    (tmp_path / "curve.json").write_text(json.dumps({"chunk_tokens": 500, "rows": rows}))
    chunk = 500 * 62 * 2 * 8 * 128 * 2
    whole = tables({"name": "dram", "size": 100 * chunk, "bandwidth": 1e10},
                   {"name": "disk", "size": 1000 * chunk, "bandwidth": 1e9},
                   workload={"hit_curve": "curve.json"})  # fmt: skip
    sheet = work_out(whole, tmp_path)
    found = [sheet.get(f"s.{name}") for name in ("dram.hit_rate", "disk.hit_rate", "hit_rate")]
    assert found == pytest.approx([0.2, 0.3, 0.5])
    del whole["model"]
    whole["workload"]["session_bytes"] = "1 GB"
    assert "needs the tier's size and [model]" in work_out(whole, tmp_path).absent["s.at_8.ttft"]


def test_a_trace_gives_lengths_and_hit_rates(tmp_path: Path) -> None:
    line = {"input_length": 1024, "output_length": 64, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text("\n".join([json.dumps(line)] * 4))
    whole = tables({"name": "disk", "size": "1 TB", "bandwidth": 1e9}, workload={"trace": "trace.jsonl"})
    del whole["workload"]["prompt_tokens"], whole["workload"]["output_tokens"]
    sheet = work_out(whole, tmp_path)
    found = [sheet.get(name) for name in ("prompt_tokens", "output_tokens", "s.hit_rate")]
    assert found == [1024, 64, 0.75]


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("version = = 1")
    with pytest.raises(InvalidRequest, match="not valid TOML"):
        inputs.read(tmp_path / "plan.toml")
    with pytest.raises(InvalidRequest, match="No such file"):
        inputs.read(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "text",
    [
        "setup = 1", "setup = [1]", "[[setup]]\nname = 's'", "[[setup]]\nname = 's'\ntier = []",
        "workload = 3", "check = {}", "[[check]]\nname = 'a'", "given = 3", "title = 3",
        "[[check]]\nname = 'a'\nprinted = '0 s'", "[money]\nexchange = 3", "[model]\nlayers = 1",
        "[[check]]\nname = 'a'\nprinted = '1 s'\nformula = 'b'\nat_least = 1",
        "[[setup]]\nname = 's'\n[[setup.tier]]\nname = 'a'\nbandwidth = 1\n"
        "[[setup.tier]]\nname = 'a'\nbandwidth = 1",
    ],
)  # fmt: skip
def test_tables_of_another_shape_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        build(tomllib.loads(f"version = 1\n{text}"))


def test_the_example_of_the_page_gives_every_figure() -> None:
    page = Path(__file__).parents[2] / "docs" / "PLANNING.md"
    example = tomllib.loads(page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0])
    del example["model"]["config"], example["setup"][0]["tier"][0]["hit_rate"]
    example["model"] |= {"layers": 62, "kv_heads": 8, "head_dim": 128}
    assert work_out(example).absent == {}


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["1 GB", "-1 s", "3 GB/s", "1e308 GB", "5 CNY", "lru", "config.json", "a + b", "1 / 0"]),
    st.lists(st.integers(-1, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def places(table: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in nested tables and lists."""
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    return [at, *(place for name, value in inner for place in places(value, (*at, name)))]


@given(st.data(), st.sampled_from(["case", "plan"]), values)
def test_whatever_a_field_is_the_answer_is_a_plan_or_a_sentence(
    data: st.DataObject, which: str, value: Any
) -> None:
    whole = cases.read("fx100") if which == "case" else tables()
    *parents, name = data.draw(st.sampled_from(places(whole)[1:]))
    where = whole
    for parent in parents:
        where = where[parent]
    where[name] = value
    try:
        read = build(whole)
        accounting.results(read, accounting.work_out(read))
    except InvalidRequest:
        pass
