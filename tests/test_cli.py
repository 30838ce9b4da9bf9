"""The command line as a user meets it: exit codes, messages, files, signals, pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from hicache_fsm.cli import main
from hicache_fsm.lifecycle.model import Kind
from hicache_fsm.lifecycle.table import REQUEST_TABLE
from tests.conftest import ROOT

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "gpu")]), "NO_COLOR": "1"}
COMMAND = [sys.executable, "-m", "hicache_fsm.cli"]
QUICK = ["replay", "--requests", "40", "--device-tokens", "16384", "--staging-tokens", "8192", "--concurrency", "16"]
LONG = ["replay", "--requests", "5000", "--device-tokens", "32768", "--staging-tokens", "16384"]
"""Runs for much longer than a test waits; ended by a signal."""
TIMEOUT = 90


def cli(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [*COMMAND, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=TIMEOUT, check=False)


class Done(NamedTuple):
    code: object
    out: str
    err: str


class Here:
    """The command in this process, where torch has long been loaded. An exception that a user would see as a
    traceback fails the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> Done:
        try:
            code: object = main(list(map(str, args)))
        except SystemExit as end:  # the parser's refusals
            code = end.code
        return Done(code, *self._capsys.readouterr())

    def refused(self, *args: object) -> str:
        """What it says when it refuses: on standard error, with code 2."""
        done = self(*args)
        assert done.code == 2, done
        assert done.out == "" or done.out.startswith("replaying")
        return done.err


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(capsys)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run that writes all files, and their folder."""
    out = tmp_path_factory.mktemp("out") / "new"  # made by the command
    done = cli(*QUICK, "--json", out / "r.json", "--report", out / "r.html", "--log", out / "r.log", "--debug")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, out


def test_a_run_that_passes_says_so(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = finished
    lines = done.stdout.splitlines()
    assert lines[0] == "replaying 40 requests of the built-in chat workload, seed 0"
    assert lines[-1] == "PASSED"
    assert any(line.startswith("everything owned is back") for line in lines)


def test_a_pipe_gets_no_progress_bar(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = finished
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


def test_the_json_has_its_fields(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    record = json.loads((out / "r.json").read_text())
    for name in ("requests", "found", "spliced", "retries", "parks", "defers", "retractions", "shrinks",
                 "content_errors", "leaks", "passes"):  # fmt: skip
        assert type(record[name]) is int, name
    assert record["seconds"] > 0
    assert record["outcomes"] == {"finished": 40, "aborted": 0, "rejected": 0}
    tokens = record["tokens"]
    assert {"prompt", "device", "storage", "computed", "ideal", "device_only"} <= tokens.keys()
    assert tokens["prompt"] == tokens["device"] + tokens["storage"] + tokens["computed"]
    assert record["found"] == record["spliced"] + sum(record["unfulfilled"].values())
    assert (record["content_errors"], record["leaks"], record["passed"]) == (0, 0, True)


class Outside(HTMLParser):
    """Collects what a browser would load from elsewhere, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe", "object"):
            self.found.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_self_contained_file(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    page = (out / "r.html").read_text()
    reader = Outside()
    reader.feed(page)
    assert reader.found == []
    assert reader.open == []
    assert not re.search(r"https?:|@import|url\(", page)
    assert "PASSED" in page


def test_each_line_of_the_log_is_a_row_of_the_table(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    states, events = REQUEST_TABLE.states, REQUEST_TABLE.events
    legal = {
        (states[row.source].label, events[row.event].name, states[row.target].label)
        for row in REQUEST_TABLE.rows
        if row.kind is Kind.TRANSITION
    }
    last: dict[tuple[str, int], str] = {}
    passes = 0
    for line in (out / "r.log").read_text().splitlines():
        record = json.loads(line)
        assert (record["from"], record["event"], record["to"]) in legal, record
        key = (record["rid"], record["attempt"])
        assert record["from"] == last.get(key, states[0].label), f"{record} continues from {last.get(key)}"
        last[key] = record["to"]
        assert record["pass"] >= passes
        passes = record["pass"]
    assert {rid for rid, _ in last} == {f"r{i}" for i in range(40)}
    assert all(to in ("finished", "aborted") for to in last.values())


def test_no_draft_is_left_beside_the_files(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    assert sorted(path.name for path in out.iterdir()) == ["r.html", "r.json", "r.log"]


def test_quiet_prints_the_verdict_only(here: Here) -> None:
    assert here(*QUICK, "--quiet") == (0, "PASSED\n", "")


def test_a_trace_with_all_options_in_upstream_names(here: Here, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, %d]}'
    trace.write_text("\n".join(line % (9 * i, i + 3) for i in range(9)))
    done = here(
        "replay", trace, "--limit", 6, "--speed", 2, "--page-size", 16, "--bytes-per-token", 32, "--layers", 2,
        "--pools", "tight", "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-prefetch-retry-max-attempts", 3, "--hicache-storage-prefetch-retry-poll-interval", 0,
        "--pin-cap", 0.25, "--max-defers", 4, "--park-cap", 9, "--chunked-prefill-size", 512,
        "--max-prefill-tokens", 1024, "--max-running-requests", 4, "--read-threads", 1, "--lookup-threads", 1,
        "--store", tmp_path / "store", "--store-bytes", 1 << 20, "--store-latency-ms", 1, "--json", tmp_path / "o.json",
    )  # fmt: skip
    assert done.code == 0, done
    record = json.loads((tmp_path / "o.json").read_text())
    wanted = {
        "trace": str(trace), "limit": 6, "speed": 2.0, "page_size": 16, "bytes_per_token": 32, "num_layers": 2,
        "device_tokens": 262_144, "staging_tokens": 65_536, "policy": "wait_complete", "retry_max_attempts": 3,
        "poll_interval": 0, "pin_cap": 0.25, "max_defers": 4, "park_cap": 9, "chunked_prefill_size": 512,
        "max_prefill_tokens": 1024, "max_running_requests": 4, "read_threads": 1, "lookup_threads": 1,
        "store": str(tmp_path / "store"), "store_bytes": 1 << 20, "latency_s": 0.001,
    }  # fmt: skip
    assert wanted.items() <= record["options"].items()
    assert record["requests"] == 6


def test_short_names_mean_the_same(here: Here, tmp_path: Path) -> None:
    done = here(*QUICK, "--retry-max-attempts", 0, "--poll-interval", 0, "--quiet", "--json", tmp_path / "o.json")
    assert done.code == 0
    record = json.loads((tmp_path / "o.json").read_text())
    assert (record["options"]["retry_max_attempts"], record["options"]["poll_interval"]) == (0, 0)
    assert record["retries"] == 0


# ── a run that fails ─────────────────────────────────────────────────────────────────────────────────


def test_a_planted_fault_ends_with_code_1_and_the_reason(here: Here, tmp_path: Path) -> None:
    done = here(*QUICK, "--plant", "skip-layer-wait", "--json", tmp_path / "r.json", "--report", tmp_path / "r.html")
    assert done.code == 1, done
    last = done.out.splitlines()[-1]
    assert last.startswith("FAILED: ")
    assert "rows held wrong bytes" in last
    assert json.loads((tmp_path / "r.json").read_text())["content_errors"] > 0
    assert "FAILED" in (tmp_path / "r.html").read_text()


def test_a_dead_store_is_told_briefly_and_passes(here: Here) -> None:
    done = here(*QUICK, "--store-kill-after", 0)
    assert done.code == 0, done
    lines = done.err.splitlines()
    assert lines[-1] == "(further warnings are counted only)"
    assert len(lines) == 6


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["replay", "missing.jsonl"], "missing.jsonl"),
        (["replay", "."], "cannot read trace"),
        (["replay", "--limit", "0"], "limit 0"),
        (["replay", "--requests", "many"], "invalid int value"),
        (["replay", "--requests", "0"], "requests"),
        (["replay", "--policy", "never"], "invalid choice"),
        (["replay", "--pin-cap", "2"], "anchor_lock_cap"),
        (["replay", "--store-fail-rate", "2"], "rates lie in 0..1"),
        (["replay", "--bytes-per-token", "30"], "multiple of 8"),
        (["replay", "--plant", "nothing"], "invalid choice"),
        (["replay", "--device-tokens", "1125899906842624"], "MiB of memory"),
        (["replay", "--store", "file"], "--store"),
        (["replay", "--no-such-option"], "unrecognized arguments"),
        (["replay", "one", "two"], "unrecognized arguments"),
        (["unknown"], "invalid choice"),
        ([], "COMMAND"),
        (["render", "--format", "svg", "--topic", "nothing"], "nothing"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(
    here: Here, args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert says in here.refused(*args)


def test_a_broken_trace_is_named_with_its_line(here: Here, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n{"timestamp": 0, "inp')
    assert f"{trace}, line 2" in here.refused("replay", trace)


@pytest.mark.parametrize("option", ["--json", "--report", "--log"])
def test_outputs_are_tried_before_the_run(here: Here, option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "below"):
        message = here.refused(*QUICK, option, target)
        assert f"cannot write {target}" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_two_outputs_of_one_name_are_refused(here: Here, tmp_path: Path) -> None:
    assert "two outputs" in here.refused(*QUICK, "--json", tmp_path / "x", "--log", tmp_path / "x")


def test_a_refused_run_leaves_older_results_alone(here: Here, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("older")
    here.refused("replay", tmp_path / "missing", "--json", tmp_path / "r.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.json", "older")]


# ── signals, terminals, pipes ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    args = [*LONG, "--log", tmp_path / "log", "--json", tmp_path / "r.json", "--report", tmp_path / "r.html"]
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    )
    with (tmp_path / "log").open() as log:
        for _ in range(500):
            assert log.readline(), "the run ended before it was interrupted"
        process.send_signal(number)
        rest = log.read()  # to its end: the pipe must not fill up
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number, out + err
    assert out.splitlines()[-1].startswith("FAILED: interrupted; ")
    assert "everything owned is back" in out
    assert "Traceback" not in err
    assert '"to":"aborted"' in rest
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["interrupted"], record["leaks"], record["content_errors"]) == (True, 0, 0)
    assert record["outcomes"]["aborted"] > 0
    assert "interrupted" in (tmp_path / "r.html").read_text()


def read_terminal(controller: int) -> bytes:
    """All that was written to a terminal whose other side is closed by its process."""
    shown = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # how a pseudo terminal says that nobody writes any more
            return shown
        if not part:
            return shown
        shown += part


def test_a_terminal_gets_a_progress_bar() -> None:
    controller, terminal = pty.openpty()
    env = {key: value for key, value in ENV.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *QUICK], stdout=subprocess.PIPE, stderr=terminal, env=env, text=True)
    os.close(terminal)
    shown = read_terminal(controller)
    out, _ = process.communicate(timeout=TIMEOUT)
    os.close(controller)
    assert process.returncode == 0
    assert b"40/40" in shown.replace(b" ", b"") or b"/40" in shown
    assert out.splitlines()[-1] == "PASSED"


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    process = subprocess.Popen([*COMMAND, *QUICK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert err == ""


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────


def test_help_needs_no_heavy_module() -> None:
    code = (
        "import sys\nfrom hicache_fsm.cli import main\n"
        "try: main(['replay', '--help'])\nexcept SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'numpy', 'rich', 'transitions', 'graphviz') if m in sys.modules]\n"
        "sys.exit(f'help has loaded {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert "--hicache-storage-prefetch-policy" in done.stdout


def test_version(here: Here) -> None:
    done = here("--version")
    assert done.code == 0
    assert done.out.startswith("hicache-fsm")


def test_render_writes_a_picture(here: Here, tmp_path: Path) -> None:
    assert here("render", "--format", "dot", "--out", tmp_path / "deep" / "x.dot") == (0, "", "")
    assert (tmp_path / "deep" / "x.dot").read_text().startswith("digraph")


def test_results_can_go_to_a_device() -> None:
    done = cli(*QUICK, "--quiet", "--json", "/dev/stdout")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removesuffix("PASSED\n"))["passed"] is True
    assert Path("/dev/stdout").exists()
