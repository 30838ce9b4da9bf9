"""Pictures and documents show what the tables say, and a document that does not is noticed."""

from __future__ import annotations

import argparse
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle import derive
from hicache_fsm.lifecycle.diagrams import (
    ALL,
    FORMATS,
    OVERVIEW,
    SHARED_FROM,
    TABLES,
    Graph,
    graph_of,
    moves,
    render,
    row_label,
    topics,
)
from hicache_fsm.lifecycle.model import Kind, Table
from hicache_fsm.lifecycle.render_cli import add_render_arguments, run_render
from tests.layers import ROOT

PICTURES = [(name, topic) for name, table in TABLES.items() for topic in topics(table)]


def text(table: str, output_format: str, topic: str | None = None) -> str:
    rendered = render(table, output_format, topic)
    assert isinstance(rendered, str)
    return rendered


def drawn_rows(graph: Graph, table: Table) -> set[tuple[str, str, str]]:
    """What the arrows say about states: (source, target, label), with groups and boxes spelled out."""
    members: dict[str, set[str]] = {state.name: {state.name} for state in table.states}
    for state in table.states:
        members.setdefault(state.parent, set()).add(state.name)
    for node in graph.nodes:
        if node.stands_for:
            members[node.name] = {leaf for name in node.stands_for for leaf in members[name]}
    return {
        (source, edge.target, label)
        for edge in graph.edges
        for source in members[edge.source]
        for label in edge.labels
    }


class TestGraph:
    @pytest.mark.parametrize(("name", "topic"), [(n, t) for n, t in PICTURES if t != OVERVIEW])
    def test_shows_exactly_the_transitions_of_its_topic(self, name: str, topic: str) -> None:
        table = TABLES[name]
        wanted = {
            (table.states[row.source].name, table.states[row.target].name, row_label(table, row))
            for row in table.rows
            if row.kind is Kind.TRANSITION and topic in (ALL, row.topic)
        }
        assert wanted
        assert drawn_rows(graph_of(table, topic), table) == wanted

    def test_topics_divide_the_transitions_of_a_request(self) -> None:
        table = TABLES["request"]
        named = [topic for topic in topics(table) if topic not in (OVERVIEW, ALL)]
        assert {"lookup", "retry", "load", "cut", "bounds", "admission", "ending", "close"} <= set(named)
        divided = sorted(row.id for topic in named for row in moves(table, topic) if row.topic == topic)
        assert divided == [row.id for row in table.rows if row.kind is Kind.TRANSITION]

    def test_overview_of_requests_has_groups_and_events_only(self) -> None:
        table = TABLES["request"]
        graph = graph_of(table, OVERVIEW)
        states = {node.name for node in graph.nodes if not node.stands_for}
        assert states == {state.parent for state in table.states}
        boxes = {node.name: node.stands_for for node in graph.nodes if node.stands_for}
        drawn = {
            (source, edge.target, label)
            for edge in graph.edges
            for source in boxes.get(edge.source, (edge.source,))
            for label in edge.labels
        }
        assert drawn == {
            (table.states[r.source].parent, table.states[r.target].parent, table.events[r.event].name)
            for r in table.rows
            if r.kind is Kind.TRANSITION
        }

    @pytest.mark.parametrize(("name", "topic"), PICTURES)
    def test_every_node_has_an_arrow_and_every_arrow_two_nodes(self, name: str, topic: str) -> None:
        graph = graph_of(TABLES[name], topic)
        names = {node.name for top in graph.nodes for node in (top, *top.children)}
        ends = {end for edge in graph.edges for end in (edge.source, edge.target)}
        groups = {node.name for node in graph.nodes if node.children}
        assert ends <= names
        assert names - groups <= ends
        assert all(len(node.stands_for) >= SHARED_FROM for node in graph.nodes if node.stands_for)

    @pytest.mark.parametrize(("name", "topic"), [(n, t) for n, t in PICTURES if t != ALL])
    def test_pictures_stay_legible(self, name: str, topic: str) -> None:
        graph = graph_of(TABLES[name], topic)
        assert len(graph.edges) <= 24, f"{len(graph.edges)} arrows are too many to follow: divide the topic"


class TestFormats:
    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize("output_format", ["dot", "mermaid"])
    def test_each_state_is_drawn(self, name: str, output_format: str) -> None:
        drawing = text(name, output_format, ALL)
        for state in TABLES[name].states:
            assert state.name in drawing
            assert state.parent in drawing

    def test_mermaid_groups_are_composite_states(self) -> None:
        drawing = text("request", "mermaid", ALL)
        assert drawing.startswith("stateDiagram-v2\n")
        assert "    state queued {\n        idle\n        paced\n        refetch\n    }\n" in drawing
        assert "    [*] --> idle\n" in drawing
        assert "    finished --> [*]\n" in drawing
        assert "    parked --> parked: refused [chances_left]\n" in drawing

    def test_dot_groups_are_frames_and_guards_stand_on_arrows(self) -> None:
        drawing = text("request", "dot", ALL)
        assert "subgraph cluster_queued {" in drawing
        assert '"queued/idle" [label=idle' in drawing
        assert 'parked -> parked [label="refused [chances_left]"]' in drawing
        assert "ltail=cluster_" in drawing, "an arrow that all sub-states share leaves from the frame"

    @pytest.mark.parametrize("name", TABLES)
    def test_json_says_everything_that_the_table_says(self, name: str) -> None:
        table, content = TABLES[name], json.loads(text(name, "json"))
        assert [state["name"] for state in content["states"]] == [state.name for state in table.states]
        assert [tuple(event.values()) for event in content["events"]] == [
            (event.name, event.meaning, event.argument) for event in table.events
        ]
        assert content["guards"] == table.guards
        assert content["effects"] == table.effects
        assert len(content["rows"]) == len(table.rows)
        for row, written in zip(table.rows, content["rows"], strict=True):
            assert written["id"] == row.id
            assert written["from"] == table.states[row.source].name
            assert written["event"] == table.events[row.event].name
            assert written["kind"] == row.kind.value
            assert written["guards"] == {lit.guard: lit.value for lit in row.when}
            assert written["to"] == table.states[row.target].name
            assert tuple(written["effects"]) == row.effects
            assert written["outcome"] == row.outcome
            assert written["because"] == row.because

    def test_json_of_a_topic_has_the_rows_of_the_topic(self) -> None:
        rows = json.loads(text("request", "json", "cut"))["rows"]
        assert rows
        assert {row["topic"] for row in rows} == {"cut"}

    def test_table_has_one_line_per_transition(self) -> None:
        table = TABLES["write_span"]
        lines = text("write_span", "table").splitlines()
        assert len(lines) == 2 + sum(row.kind is Kind.TRANSITION for row in table.rows)
        assert (
            "| storing | `answered` | not usable | dropped | return_all, count_dropped | store_failed "
            "| a failed write teaches nothing |" in lines
        )

    @pytest.mark.skipif(shutil.which("dot") is None, reason="no 'dot' (apt-get install graphviz); `make test` insists")
    @pytest.mark.parametrize(("name", "topic"), PICTURES)
    def test_svg_shows_the_states_of_its_topic(self, name: str, topic: str) -> None:
        svg = render(name, "svg", topic)
        assert isinstance(svg, bytes)
        texts = {element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
        graph = graph_of(TABLES[name], topic)
        assert {node.name for top in graph.nodes for node in (top, *top.children) if not node.stands_for} <= texts
        assert {label for edge in graph.edges for label in edge.labels} <= texts

    def test_svg_without_graphviz_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(HiCacheError, match=r"apt-get install graphviz.*--format dot"):
            render("request", "svg")
        assert text("request", "dot").startswith("digraph")

    @pytest.mark.parametrize("output_format", [f for f in FORMATS if f != "svg"])
    def test_the_same_table_gives_the_same_text(self, output_format: str) -> None:
        for name, topic in PICTURES:
            assert text(name, output_format, topic) == text(name, output_format, topic)

    @pytest.mark.parametrize(
        ("arguments", "choices"),
        [
            (("requests", "dot", None), TABLES),
            (("request", "png", None), FORMATS),
            (("request", "dot", "retries"), topics(TABLES["request"])),
            (("operation", "table", "retry"), topics(TABLES["operation"])),
        ],
    )
    def test_an_unknown_name_lists_the_choices(self, arguments: tuple[str, str, str | None], choices: object) -> None:
        assert isinstance(choices, dict | tuple)
        with pytest.raises(HiCacheError) as caught:
            render(*arguments)
        assert str(caught.value).endswith("choose one of " + ", ".join(choices))


class TestCommand:
    def run(self, *options: str) -> int:
        parser = argparse.ArgumentParser()
        add_render_arguments(parser)
        return run_render(parser.parse_args(options))

    def test_writes_a_file_into_a_new_folder(self, tmp_path: Path) -> None:
        out = tmp_path / "new" / "retry.mmd"
        assert self.run("--format", "mermaid", "--topic", "retry", "--out", str(out)) == 0
        assert out.read_text() == text("request", "mermaid", "retry")

    def test_writes_to_standard_output(self, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        assert self.run("--table", "operation", "--format", "table") == 0
        assert capfdbinary.readouterr().out.decode() == text("operation", "table")

    def test_an_unknown_topic_fails_with_the_choices(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--format", "dot", "--topic", "nonsense") == 2
        assert "choose one of overview, all, lookup" in capsys.readouterr().err

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--format", "dot", "--out", str(tmp_path)) == 2
        assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


class TestDerivedDocuments:
    def test_those_of_the_repository_are_fresh(self) -> None:
        assert derive.stale(ROOT / "docs") == []

    def test_written_ones_are_fresh_and_every_change_is_noticed(self, tmp_path: Path) -> None:
        assert derive.main(["--write", "--docs", str(tmp_path)]) == 0
        assert derive.stale(tmp_path) == []
        for name in derive.derived():
            path = tmp_path / name
            original = path.read_text()
            path.write_text(original.replace("finished", "ended").replace("acked", "done").replace("stored", "kept"))
            assert derive.stale(tmp_path) == [f"{path} is stale"]
            path.unlink()
            assert derive.stale(tmp_path) == [f"{path} is missing"]
            path.write_text(original)
        assert derive.stale(tmp_path) == []
        left_over = tmp_path / "lifecycle" / "old.dot"
        left_over.touch()
        assert derive.stale(tmp_path) == [f"{left_over} is derived from no table: remove it"]

    def test_a_changed_table_makes_them_stale(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        derive.write(tmp_path)
        table = TABLES["operation"]
        rows = list(table.rows)
        rows[0] = rows[0].__class__(rows[0].source, rows[0].event, rows[0].kind, rows[0].target, "another reason")
        changed = Table(table.name, table.states, table.events, table.guards, table.effects, rows, table.initial)
        monkeypatch.setattr("hicache_fsm.lifecycle.diagrams.TABLES", {**TABLES, "operation": changed})
        monkeypatch.setattr(derive, "TABLES", {**TABLES, "operation": changed})
        assert derive.stale(tmp_path) == [
            f"{tmp_path / 'lifecycle.md'} is stale",
            f"{tmp_path / 'lifecycle' / 'operation.json'} is stale",
        ]

    def test_check_names_the_stale_ones_and_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert derive.main(["--check", "--docs", str(tmp_path)]) == 1
        message = capsys.readouterr().err
        assert f"{tmp_path / 'lifecycle.md'} is missing" in message
        assert "run 'make render'" in message
        derive.write(tmp_path)
        assert derive.main(["--check", "--docs", str(tmp_path)]) == 0

    def test_the_page_shows_every_row_and_word(self) -> None:
        page = derive.derived()["lifecycle.md"]
        for table in TABLES.values():
            for row in table.rows:
                assert row.because in page
            for word in (*table.guards, *table.effects, *(event.name for event in table.events)):
                assert f"`{word}`" in page
            for state in table.states:
                assert f"**{state.label}**" in page
        assert "### Theory of operation" in page
        assert page.count("```mermaid") == len([t for _, t in PICTURES if t != ALL])
