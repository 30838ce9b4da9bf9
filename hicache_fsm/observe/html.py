"""The summary of a replay as one HTML file: no scripts, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from hicache_fsm.observe.html_style import STYLE
from hicache_fsm.observe.report import CONSERVED, share, verdict
from hicache_fsm.observe.summary import ReplayResult


class Part(NamedTuple):
    """One piece of a stacked bar."""

    label: str
    value: int
    kind: str  # a class of the style sheet, which gives the colour


def html_report(result: ReplayResult) -> str:
    """A complete document."""
    sections = (_cards, _sources, _found, _events, _waits, _memory, _notes, _options)
    body = "\n".join(section(result) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Replay: {escape(verdict(result))}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{_header(result)}\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(result: ReplayResult) -> str:
    options = result.options
    source = options.get("trace") or f"built-in chat workload, seed {options.get('seed')}"
    line = f"{result.requests:,} requests of {source} · {result.passes:,} passes · {result.seconds:,.1f} s"
    kind = "good" if result.passed else "bad"
    return (
        f'<header><div><h1>hicache-fsm replay</h1><p>{escape(line)}</p></div>'
        f'<strong class="verdict {kind}">{escape(verdict(result))}</strong></header>'
    )


def _section(title: str, *content: str, note: str = "") -> str:
    lead = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{''.join(content)}</section>"


# ── key figures ──────────────────────────────────────────────────────────────────────────────────────


def _cards(result: ReplayResult) -> str:
    tokens = result.tokens
    prompt = tokens["prompt"]
    outcomes = ", ".join(f"{count:,} {name}" for name, count in result.outcomes.items() if count)
    rate = result.passes / result.seconds if result.seconds else 0.0
    cards = (
        (f"{result.ended:,}", "requests ended", outcomes or "none", result.ended == result.requests),
        (share(result.reused, prompt), "of prompt tokens reused", f"{result.reuse_of_ideal:.3f} of the ideal", True),
        (share(tokens["storage"], prompt), "came from storage", f"{tokens['storage']:,} tokens", True),
        (f"{result.content_errors:,}", "wrong rows", f"{result.checked_rows:,} compared", not result.content_errors),
        (f"{result.leaks:,}", "leaks", "see below" if result.leaks else "everything owned is back", not result.leaks),
        (f"{rate:,.0f}", "passes a second", f"{tokens['generated']:,} tokens generated", True),
    )
    return '<section class="cards">' + "".join(_card(*card) for card in cards) + "</section>"


def _card(figure: str, what: str, detail: str, good: bool) -> str:
    kind = "" if good else ' class="bad"'
    return f"<div{kind}><b>{escape(figure)}</b><span>{escape(what)}</span><small>{escape(detail)}</small></div>"


# ── bars and tables ──────────────────────────────────────────────────────────────────────────────────


def _bar(name: str, parts: Sequence[Part], whole: int) -> str:
    pieces = "".join(
        f'<i class="{part.kind}" style="width:{100 * part.value / whole if whole else 0:.3f}%" '
        f'title="{escape(part.label)}: {part.value:,}, {share(part.value, whole)}"></i>'
        for part in parts
    )
    return f'<div class="row"><span>{escape(name)}</span><div class="bar">{pieces}</div></div>'


def _legend(parts: Iterable[Part], whole: int) -> str:
    items = "".join(
        f'<li><i class="{part.kind}"></i>{escape(part.label)} <b>{part.value:,}</b> {share(part.value, whole)}</li>'
        for part in parts
    )
    return f'<ul class="legend">{items}</ul>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """The first column is text, the others are right-aligned. `kinds` give the colours of the first rows."""
    swatches = [f'<i class="{kind}"></i>' for kind in kinds] + [""] * (len(rows) - len(kinds))
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td>{swatch}{escape(row[0])}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for swatch, row in zip(swatches, rows, strict=True)
    )
    table = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{table}</table></div>'


def _sources(result: ReplayResult) -> str:
    tokens = result.tokens
    prompt = tokens["prompt"]
    parts = [Part(f"{name}", tokens[name], name) for name in ("device", "storage", "computed")]
    ideal, device_only = tokens["ideal"], tokens["device_only"]
    return _section(
        "Where the prompt tokens came from",
        _bar("this run", parts, prompt),
        _bar("ideal", [Part("an unbounded cache", ideal, "ideal")], prompt),
        _bar("device only", [Part("an LRU cache of the device pool", device_only, "device")], prompt),
        _legend([*parts, Part("ideal", ideal, "ideal")], prompt),
        note=f"{prompt:,} prompt tokens, each counted at its request's first commit; {tokens['redone']:,} were "
        f"computed again later. The ideal is a cache without limits, filled at once; the device pool alone would have "
        f"reused {device_only:,} ({share(device_only, prompt)}).",
    )


def _found(result: ReplayResult) -> str:
    lost = [Part(name.replace("_", " "), count, f"lost{i % 6}") for i, (name, count) in enumerate(_by_size(result))]
    parts = [Part("spliced", result.spliced, "storage"), *lost]
    rows = [(part.label, f"{part.value:,}", share(part.value, result.found)) for part in parts]
    rows.append(("all found", f"{result.found:,}", ""))
    return _section(
        "What became of storage hits",
        _bar("found", parts, result.found),
        _table(("outcome", "tokens", "share"), rows, [part.kind for part in parts]),
        note="Tokens that look-ups found in storage: spliced ones reached the device; each other one has its reason.",
    )


def _by_size(result: ReplayResult) -> list[tuple[str, int]]:
    return sorted(result.unfulfilled.items(), key=lambda item: -item[1])


def _events(result: ReplayResult) -> str:
    names = ("retries", "parks", "bypasses", "defers", "retractions", "shrinks", "restarts")
    dropped: Mapping[str, int] = result.writes["dropped_pages"]
    figures = [(name, getattr(result, name)) for name in names]
    figures += [("pages stored", result.writes["stored_pages"]), ("pages dropped", sum(dropped.values()))]
    figures += [("storage errors", result.store["errors"])]
    items = "".join(f"<div><b>{value:,}</b><span>{escape(name)}</span></div>" for name, value in figures)
    return _section("What happened", f'<div class="figures">{items}</div>')


def _waits(result: ReplayResult) -> str:
    rows = [
        (state, f"{wait['passes']:,}", f"{wait['seconds']:,.3f}", wait["rid"])
        for state, wait in result.longest_waits.items()
    ]
    return _section("Longest stay in each state", _table(("state", "passes", "seconds", "request"), rows))


def _memory(result: ReplayResult) -> str:
    marks = result.high_water
    bars = []
    for name, key, limit in (
        ("reads", "staging_reads", "staging"), ("writes", "staging_writes", "staging"), ("pins", "pinned", "pin_cap"),
    ):  # fmt: skip
        label = f"{marks[key]:,} of {marks[limit]:,}"
        bars.append(_bar(name, [Part(name, marks[key], "device")], marks[limit]) + f'<p class="under">{label}</p>')
    return _section("High-water marks", *bars, note="Tokens of staging used by reads and by writes, and tokens pinned.")


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────


def _notes(result: ReplayResult) -> str:
    lists = (
        ("Rejected requests", result.rejections), ("Wrong rows", result.error_list), ("Leaks", result.leak_list),
    )  # fmt: skip
    parts = [
        f"<h3>{title}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines[:32])}</ul>"
        for title, lines in lists
        if lines
    ]
    if not result.leaks:
        parts.append(f"<p>{escape(CONSERVED.capitalize())}.</p>")
    return _section("Conservation", *parts)


def _options(result: ReplayResult) -> str:
    rows = [(name, str(value)) for name, value in result.options.items() if value not in (None, "")]
    return f"<section><details><summary>Options</summary>{_table(('option', 'value'), rows)}</details></section>"
