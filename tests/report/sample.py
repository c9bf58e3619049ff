"""Findings as a run on a GPU would make them, with every section filled."""

from tileloom.report.findings import (
    Agreement,
    BackendRow,
    Contest,
    Fact,
    Findings,
    Hit,
    KernelRow,
    Played,
    PlayedRow,
    Search,
    Span,
    TimeRow,
    Track,
)


def sample():
    return Findings(
        version="1.2.3",
        date="2026-11-27",
        model="a <model> & more",
        text="80 passages (2,760 words) of the project's own text",
        environment=[Fact("hardware", "NVIDIA H100 80GB HBM3, 132 multiprocessors")],
        agreements=[
            Agreement("float16", 80, 0.41, 4.1e-4, 0.9999991, "", 16, 3.0e-4, 3.9e-4, 0.17),
            Agreement("float32", 80, 0.41, 1.9e-7, 1.0, "", 16, 1.7e-7, 1.7e-7, 0.17),
        ],
        searches=[
            Search(
                "What is <script>alert(1)</script>?",
                (Hit(0.61, "docs/a.md, One", "Text & more."), Hit(-0.1, "b", "c < d")),
            )
        ],
        backends=[
            BackendRow(30, "float16, 12 heads of 32", "gluon_sm90", ("the first",), ""),
            BackendRow(
                30,
                "float32, 12 heads of 32",
                "triton",
                ("the first", "gluon_sm90 refused: dtype torch.float32 is not float16 or bfloat16"),
                "",
            ),
        ],
        contests=[
            Contest(
                "One attention call (batch 64, 12 heads of 32, 256 tokens, float16, padded)",
                (
                    TimeRow("tileloom", "ok", 41.2, 40.9, 42.0, note="by gluon_sm90"),
                    TimeRow("PyTorch cuDNN", "ok", 61.0, 60.2, 61.8, 1.48, 1.46, 1.5),
                    TimeRow("PyTorch flash", "refused", note="RuntimeError: no mask <here>"),
                    TimeRow("PyTorch mem-efficient", "ok", 120.4, 119.0, 133.0, 2.92, 2.9, 3.1),
                    TimeRow("PyTorch math", "wrong", note="AccuracyError: off"),
                ),
            )
        ],
        kernels=[
            KernelRow("attention_fwd_gluon_sm90[d64]", "sm_90", 168, 0, 114688, 2, 1, 4.2),
            KernelRow("attention_fwd_triton[d32]", "sm_90", 175, 0, 16384, 1, 2, None),
        ],
        compiler="3.7.1",
        left_out=24,
        played=played(),
        seconds=61.3,
    )


def played():
    return Played(
        problem="4 texts, 12 heads of 32, cast to float16",
        plain_error=5.9e-3,
        rows=(
            PlayedRow("as shipped", "late", 6.7e-4, "", 0),
            PlayedRow("one wait removed", "eager", 6.8e-4, "", 2, changed=True),
            PlayedRow("one wait removed", "late", float("nan"), "a NaN", 3, changed=True),
        ),
        programs=4,
        accesses=1504,
        removed="kernel.py:203  mbarrier.wait(full, phase)",
        report="[race] shared buffer <ring> is read\n    at   kernel.py:207",
        timeline="timeline.json",
        tracks=(
            Track("producer", (Span(0, 2, "run", "run <here>"), Span(2, 12, "wait", "wait"))),
            Track("copies in flight", (Span(2, 9, "load", "a"), Span(4, 14, "load", "b"))),
        ),
    )
