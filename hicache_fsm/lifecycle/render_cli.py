"""The `render` command: one table, in one format, to a file or to the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hicache_fsm.errors import HiCacheError
from hicache_fsm.lifecycle.diagrams import FORMATS, TABLES, render, topics


def add_render_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options that `run_render` reads."""
    choices = "; ".join(f"{name}: {', '.join(topics(table))}" for name, table in TABLES.items())
    parser.add_argument("--table", default="request", choices=list(TABLES), help="which machine (default: request)")
    parser.add_argument("--format", default="svg", choices=FORMATS, help="what to write (default: svg)")
    parser.add_argument(
        "--topic",
        help=f"which part of the table. Without it, pictures show the overview, json and table everything. {choices}",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: standard output)")


def run_render(args: argparse.Namespace) -> int:
    """Render as the options say. Returns the exit code: 0, or 2 with the reason on standard error."""
    try:
        content = render(args.table, args.format, args.topic)
        _write(args.out, content if isinstance(content, bytes) else content.encode())
    except HiCacheError as error:
        print(f"hicache-fsm render: {error}", file=sys.stderr)
        return 2
    return 0


def _write(out: Path | None, content: bytes) -> None:
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise HiCacheError(f"cannot write {out}: {error.strerror or error}; give --out another place") from error
