"""Benchmarks that can be trusted: checked results, interleaved contenders, intervals, bars.

`tileloom bench` is built from these parts; `docs/benchmarks.md` states the protocol.
"""

from tileloom.bench.bars import Bar, BarResult, judge_bars, load_bars
from tileloom.bench.case import AttentionCase, load_cases, select
from tileloom.bench.contender import Contender, Inputs
from tileloom.bench.peers import PEERS, attention_peers
from tileloom.bench.reference import reference_pair
from tileloom.bench.run import CellResult, Entry, Session, run_cell
from tileloom.bench.stats import Ratio, Summary, geometric_mean, ratio_of, summarise
from tileloom.bench.store import document, load, save
from tileloom.bench.timer import DeviceTimer, Plan, Sample, Timer, affordable_rounds, interleave

__all__ = [
    "PEERS",
    "AttentionCase",
    "Bar",
    "BarResult",
    "CellResult",
    "Contender",
    "DeviceTimer",
    "Entry",
    "Inputs",
    "Plan",
    "Ratio",
    "Sample",
    "Session",
    "Summary",
    "Timer",
    "affordable_rounds",
    "attention_peers",
    "document",
    "geometric_mean",
    "interleave",
    "judge_bars",
    "load",
    "load_bars",
    "load_cases",
    "ratio_of",
    "reference_pair",
    "run_cell",
    "save",
    "select",
    "summarise",
]
