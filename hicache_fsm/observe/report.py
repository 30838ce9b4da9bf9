"""The summary of a replay as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hicache_fsm.observe.summary import ReplayResult

LABEL = 16  # columns of the left margin
NUMBER = 14  # columns of a right-aligned number
SHOWN = 5  # rejections, wrong rows and leaks that are spelt out

CONSERVED = (
    "everything owned is back: no staging page, no pin, no tree lock, no device page outside the tree, "
    "no retry, no deadline, no operation"
)


def share(part: float, whole: float) -> str:
    """A percentage, or a dash where there is nothing to have a share of."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def text_report(result: ReplayResult) -> str:
    """Everything worth reading after a run; the last line is the verdict."""
    sections = (_requests, _tokens, _found, _events, _speed, _memory, _waits, _writes, _content, _conservation)
    blocks = ("\n".join(section(result)) for section in sections)
    return "\n\n".join([*blocks, verdict(result)])


def verdict(result: ReplayResult) -> str:
    failures = result.failures()
    return f"FAILED: {'; '.join(failures)}" if failures else "PASSED"


def _line(label: str, value: object, *notes: str) -> str:
    number = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{label:<{LABEL}}{number:>{NUMBER}}  {'  '.join(notes)}".rstrip()


def _table(title: str, rows: Mapping[str, int], whole: int) -> Iterator[str]:
    """Rows with their share of `whole`; the width of the label follows the longest one."""
    yield title
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        yield f"  {name:<{max(width, LABEL - 2)}}{value:>{NUMBER},}  {share(value, whole):>8}"


def _some(lines: list[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN:,} more"


def _requests(result: ReplayResult) -> Iterator[str]:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in result.outcomes.items())
    yield _line("requests", result.requests, outcomes)
    yield from _some(result.rejections)


def _tokens(result: ReplayResult) -> Iterator[str]:
    tokens = result.tokens
    prompt = tokens["prompt"]
    yield from _table("prompt tokens", {name: tokens[name] for name in ("device", "storage", "computed")}, prompt)
    yield _line("  all", prompt)
    of_ideal = f"{result.reuse_of_ideal:.3f} of the ideal"
    yield _line("reused", result.reused, f"{share(result.reused, prompt):>8}", of_ideal)
    yield _line("ideal", tokens["ideal"], f"{share(tokens['ideal'], prompt):>8}", "an unbounded cache, filled at once")
    device_only = tokens["device_only"]
    yield _line("device only", device_only, f"{share(device_only, prompt):>8}", "an LRU cache of the device pool alone")
    yield _line("redone", tokens["redone"], "computed again after retractions and failed loads")
    yield _line("generated", tokens["generated"])


def _found(result: ReplayResult) -> Iterator[str]:
    yield _line("found", result.found, "tokens that look-ups found in storage")
    yield _line("spliced", result.spliced, f"{share(result.spliced, result.found):>8}")
    if result.unfulfilled:
        yield from _table("unfulfilled", result.unfulfilled, result.found)


def _events(result: ReplayResult) -> Iterator[str]:
    for name in ("retries", "parks", "bypasses", "defers", "retractions", "shrinks", "restarts"):
        yield _line(name, getattr(result, name))


def _speed(result: ReplayResult) -> Iterator[str]:
    rate = result.passes / result.seconds if result.seconds else 0.0
    yield _line("passes", result.passes, f"in {result.seconds:,.1f} s, {rate:,.0f} a second")


def _memory(result: ReplayResult) -> Iterator[str]:
    yield "high-water marks, in tokens"
    for name, capacity in (("staging_reads", "staging"), ("staging_writes", "staging"), ("pinned", "pin_cap")):
        value, limit = result.high_water[name], result.high_water[capacity]
        yield _line(f"  {name.replace('_', ' ')}", value, f"{share(value, limit):>8}", f"of {limit:,}")


def _waits(result: ReplayResult) -> Iterator[str]:
    yield f"{'longest wait':<24}{'passes':>10}{'seconds':>11}  request"
    for state, wait in result.longest_waits.items():
        yield f"  {state:<22}{wait['passes']:>10,}{wait['seconds']:>11,.3f}  {wait['rid']}"


def _writes(result: ReplayResult) -> Iterator[str]:
    dropped: dict[str, int] = result.writes["dropped_pages"]
    why = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
    yield _line("pages stored", result.writes["stored_pages"])
    yield _line("pages dropped", sum(dropped.values()), why)
    yield _line("storage errors", result.store["errors"])


def _content(result: ReplayResult) -> Iterator[str]:
    yield _line("rows compared", result.checked_rows, "each in every layer")
    yield _line("wrong rows", result.content_errors)
    yield from _some(result.error_list)


def _conservation(result: ReplayResult) -> Iterator[str]:
    if not result.leaks:
        yield CONSERVED
        return
    yield f"{result.leaks} leaks"
    yield from _some(result.leak_list)
