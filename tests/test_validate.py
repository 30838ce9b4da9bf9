"""`hicache-fsm validate`: logs of real runs fit; a log with one wrong line is caught at that line; files that are no
whole log are refused with a reason."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_fsm.cli import main
from hicache_fsm.observe.transitions import TransitionLog
from hicache_fsm.observe.validate import LogError, Report, add_validate_arguments, run_validate, validate
from spec.wander import config_of, wander


def log_of(seed: int) -> str:
    out = io.StringIO()
    wander(seed, TransitionLog(out))
    return out.getvalue()


def judge(text: str, **options: Any) -> Report:
    return validate(io.StringIO(text), **options)


Record = dict[str, Any]


def line(event: str, source: str, target: str, **more: Any) -> Record:
    return {"pass": 1, "rid": "r", "attempt": 1, "event": event, "from": source, "to": target, "argument": 0,
            "outcome": "", **more}  # fmt: skip


def text(*records: Record) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


IDLE, PACED, REFETCH = "queued/idle", "queued/paced", "queued/refetch"
QUERYING, READING, RESIDENT = "prefetching/querying", "prefetching/reading", "admitted/resident"
LOOKUP = line("lookup", IDLE, QUERYING)
MISS = line("miss", QUERYING, IDLE, outcome="below_threshold")
PARK = line("park", QUERYING, "parked")
ADMIT = line("admit", IDLE, RESIDENT)
FINISH = line("finish", RESIDENT, "finished")


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(30))
def test_logs_of_hostile_runs_fit_with_the_caps_of_the_run(seed: int) -> None:
    config = config_of(seed)
    log = log_of(seed)
    exact = judge(
        log, retry_max_attempts=config.retry_max_attempts, max_defers=config.max_defers, park_cap=config.park_cap
    )
    assert exact.misfit is None, exact.misfit
    assert exact.lines == log.count("\n")
    assert judge(log).misfit is None, "unknown caps never refuse what known ones allow"


def test_the_log_of_a_replay_with_threads_and_staging_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    assert main(["replay", "--requests", "40", "--seed", "5", "--log", str(path)]) == 0
    capsys.readouterr()
    assert run(path) == 0
    assert "40 requests, " in capsys.readouterr().out


# ── one wrong line ───────────────────────────────────────────────────────────────────────────────────


def _busy_log() -> list[Record]:
    logs = [[json.loads(each) for each in log_of(seed).splitlines()] for seed in range(12)]
    return max(logs, key=lambda log: len({record["event"] for record in log}))


FAULTS: dict[str, Callable[[Record], Record]] = {
    "another target": lambda r: {**r, "to": "staged" if r["to"] != "staged" else "parked"},
    "another source": lambda r: {**r, "from": "staged" if r["from"] != "staged" else "parked"},
    "an unknown event": lambda r: {**r, "event": "vanish"},
    "an unknown state": lambda r: {**r, "to": "limbo"},
    "an attempt too far": lambda r: {**r, "attempt": r["attempt"] + 1},
    "a pass that goes back": lambda r: {**r, "pass": -1},
    "another outcome": lambda r: {**r, "outcome": "sunk"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_line_is_named(name: str) -> None:
    records = _busy_log()
    assert judge(text(*records)).misfit is None
    for at in range(1, len(records), 7):
        broken = [*records[:at], FAULTS[name](records[at]), *records[at + 1 :]]
        report = judge(text(*broken), running=True)
        assert report.misfit is not None and report.misfit.line == at + 1, f"line {at + 1}: {report.misfit}"


def test_a_lost_line_is_noticed_where_its_request_goes_on() -> None:
    records = [LOOKUP, MISS, ADMIT, FINISH]
    for lost in (1, 2):
        report = judge(text(*records[:lost], *records[lost + 1 :]))
        assert report.misfit is not None and report.misfit.line == lost + 1
        assert "stood in" in report.misfit.why


REFUSED = line("refused", "parked", "parked")
DROPPED = line("refused", "parked", "recomputing", outcome="host_capacity")
PREFIX = (LOOKUP, PARK)


def test_a_chance_beyond_the_known_cap_is_refused() -> None:
    log = text(*PREFIX, REFUSED, REFUSED, DROPPED)
    assert judge(log, running=True, park_cap=3).misfit is None
    assert judge(log, running=True, park_cap=2).misfit == (4, judge(log, running=True, park_cap=2).misfit.why)  # type: ignore[union-attr]
    too_late = judge(log, running=True, park_cap=4).misfit
    assert too_late is not None and too_late.line == 5 and "park_cap is at least 4" in too_late.why


def test_two_requests_that_no_cap_explains_together_are_refused() -> None:
    second = [{**record, "rid": "s"} for record in (*PREFIX, REFUSED, REFUSED)]
    report = judge(text(*PREFIX, REFUSED, DROPPED, *second), running=True)
    assert report.misfit is not None and report.misfit.line == 8
    assert report.misfit.why.startswith("request 's' attempt 1, refused: park_cap is at most 2")


def test_caps_are_narrowed_down() -> None:
    report = judge(text(*PREFIX, REFUSED, REFUSED, DROPPED), running=True)
    assert report.misfit is None
    assert report.caps["park_cap"] == "3"
    assert report.caps["max_defers"] == "1.."


POLLED = line("miss", QUERYING, PACED, outcome="below_threshold")
AGAIN = line("lookup", PACED, QUERYING)


def test_a_poll_beyond_the_share_of_the_retry_cap_is_refused() -> None:
    log = text(LOOKUP, POLLED, AGAIN, POLLED)
    assert judge(log, running=True, retry_max_attempts=3).misfit is None
    report = judge(log, running=True, retry_max_attempts=2)
    assert report.misfit is not None and report.misfit.line == 4


def test_polls_that_stop_at_different_counts_contradict_each_other() -> None:
    other = [{**record, "rid": "s"} for record in (LOOKUP, MISS)]
    report = judge(text(LOOKUP, POLLED, *other), running=True)
    assert report.misfit is not None and report.misfit.line == 4
    off = [{**record, "rid": rid} for rid in "ab" for record in (LOOKUP, MISS)]
    assert judge(text(*off), running=True).misfit is None, "without any poll they may be switched off"


def test_storage_that_is_closed_is_not_asked() -> None:
    read = (LOOKUP, line("grant", QUERYING, READING), line("deadline", READING, "staged", argument=1))
    back = line("shrank", "staged", REFETCH, outcome="shrunk")
    report = judge(text(*read, back), running=True)
    assert report.misfit is not None and "closed" in report.misfit.why


def test_only_the_first_look_up_of_an_attempt_begins_in_idle() -> None:
    report = judge(text(LOOKUP, MISS, LOOKUP), running=True)
    assert report.misfit is not None and report.misfit.line == 3


def test_the_landed_pages_decide_where_a_read_leads() -> None:
    head = (LOOKUP, line("grant", QUERYING, READING))
    assert judge(text(*head, line("read_done", READING, "staged", argument=2)), running=True).misfit is None
    report = judge(text(*head, line("read_done", READING, "staged")), running=True)
    assert report.misfit is not None and "argument 0" in report.misfit.why


def test_a_request_goes_on_as_the_next_attempt_and_starts_anew_after_its_end() -> None:
    end = line("retract", RESIDENT, "aborted", outcome="retracted")
    second = [{**record, "attempt": 2} for record in (LOOKUP, MISS, ADMIT, FINISH)]
    report = judge(text(LOOKUP, MISS, ADMIT, end, *second, LOOKUP, MISS, ADMIT, FINISH))
    assert (report.misfit, report.requests, report.attempts, report.running) == (None, 2, 3, 0)
    skipped = [{**record, "attempt": 3} for record in second]
    assert judge(text(LOOKUP, MISS, ADMIT, end, *skipped)).misfit is not None


# ── files ────────────────────────────────────────────────────────────────────────────────────────────

WHOLE = text(LOOKUP, MISS, ADMIT, FINISH)


def run(path: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    add_validate_arguments(parser)
    return run_validate(parser.parse_args([str(path), *options]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (WHOLE[:-20], "line 4 is cut off"),
        (text(LOOKUP, MISS), "its end is missing"),
        (text(MISS, ADMIT, FINISH), "begins in the middle"),
        (text({**LOOKUP, "attempt": 4}), "begins in the middle"),
        ("pass rid event\n", "line 1 is no JSON"),
        (WHOLE + "{}\n", "line 5 is no transition"),
        ("[1, 2]\n", "line 1 is no transition"),
        (text({**LOOKUP, "pass": "1"}), "line 1 is no transition"),
    ],
)
def test_a_file_that_is_no_whole_log_is_refused_with_the_reason(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LogError, match=message):
        judge(content)
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    assert run(path) == 2
    said = capsys.readouterr().err
    assert message in said and str(path) in said


def test_a_missing_and_a_compressed_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.jsonl") == 2
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    assert run(packed) == 2
    assert "is it compressed?" in capsys.readouterr().err


def test_exit_codes_and_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(WHOLE)
    assert run(path) == 0
    assert capsys.readouterr().out.startswith("4 lines, 1 requests, 1 attempts: every line fits\n")
    path.write_text(text(LOOKUP, ADMIT))
    assert run(path) == 1
    assert capsys.readouterr().out.startswith(f"{path}:2: request 'r' attempt 1, admit: continues from queued/idle")
    path.write_text(text(LOOKUP, MISS))
    assert run(path, "--running") == 0
    assert "1 still alive" in capsys.readouterr().out
