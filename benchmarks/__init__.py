"""Benchmarks. Each module `bench_*` has a `run() -> dict[str, float]`; `python -m benchmarks` runs them all."""
