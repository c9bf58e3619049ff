"""What only a GPU can show: the kernels under a model, no waiting, and capture."""

import contextlib
import warnings

import pytest
import torch
from tests.integrations.test_hf_attention import LENGTHS, plain_attention, written_out_mask
from tests.integrations.tiny_models import batch, build

from tileloom.integrations.hf_attention import interfaces, register
from tileloom.ops._op import record_choices
from tileloom.testing import assert_accurate

pytestmark = [
    pytest.mark.gpu,
    # float32, which no kernel of Hopper takes, is what some of these cases are about.
    pytest.mark.filterwarnings("ignore::tileloom.ops._op.PerformanceWarning"),
]
HALF = torch.float16


@contextlib.contextmanager
def no_waiting():
    """Make PyTorch raise at every operation that waits for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def plain(monkeypatch):
    for table, function in zip(interfaces(), (plain_attention, written_out_mask), strict=True):
        monkeypatch.setitem(table, "plain", function)


def on_gpu(kind, implementation, dtype=HALF):
    return build(kind, implementation).to("cuda", dtype)


def inputs(side):
    ids, mask = (t.cuda() for t in batch(LENGTHS, side))
    return {"input_ids": ids, "attention_mask": mask}


def hidden(model, tokens):
    with torch.inference_mode():
        return model(**tokens, output_hidden_states=True).hidden_states[-1]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "llama", "mistral"])
def test_the_kernels_agree_with_eager(kind, side, dtype):
    tokens = inputs(side)
    shown = tokens["attention_mask"].bool()
    baseline = hidden(on_gpu(kind, "eager", dtype), tokens)
    # the truth's weights are those that the kernels' model has, rounded as they are
    truth = hidden(on_gpu(kind, "plain", dtype).double(), tokens)
    with register(), record_choices() as choices:
        actual = hidden(on_gpu(kind, "tileloom", dtype), tokens)
    assert_accurate(actual[shown], truth[shown], baseline[shown], name=kind)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    fast = hopper and dtype is not torch.float32
    assert {choice.backend for choice in choices} == {"gluon_sm90" if fast else "triton"}


@pytest.mark.parametrize("padding", ["right", "unknown"])
def test_the_mask_is_made_without_waiting(padding):
    """A BERT on the GPU waits for nothing when nobody asks for the values of its mask."""
    tokens = inputs("right")
    with register(padding=padding):
        model = on_gpu("bert", "tileloom")
        hidden(model, tokens)  # compiles
        torch.cuda.synchronize()
        with no_waiting():
            hidden(model, tokens)


@pytest.mark.parametrize("padding", ["auto", "right", "unknown"])
def test_a_forward_pass_is_captured(padding):
    tokens = inputs("right")
    with register(padding=padding):
        model = on_gpu("bert", "tileloom")
        want = hidden(model, tokens).clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            hidden(model, tokens)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = hidden(model, tokens)
        tokens["input_ids"].copy_(tokens["input_ids"].flip(0))
        tokens["attention_mask"].copy_(tokens["attention_mask"].flip(0))
        graph.replay()
        shown = tokens["attention_mask"].bool()
        assert (out - want.flip(0))[shown].abs().max() < 2e-2 * want.abs().max()


@pytest.mark.timeout(300)
def test_the_contests_of_the_demo(tmp_path):
    from tests.integrations.tiny_models import save_tiny_bert

    from tileloom.integrations.hf_embedder import BUNDLED_PACKAGE, Embedder, bundled_model
    from tileloom.report.embedding_contests import embedding_contests

    try:
        bundled_model()
    except ValueError:
        pytest.skip(f"{BUNDLED_PACKAGE}, whose tokenizer this needs, is not installed")
    texts = [f"{'word ' * n} and a text of {n} words" for n in range(1, 40)]
    with register():
        embedder = Embedder(save_tiny_bert(tmp_path, max_length=128))
        contests, trouble = embedding_contests(
            embedder, texts, torch.device(torch.cuda.current_device())
        )
    assert trouble == ""
    assert len(contests) == 3
    for contest in contests:
        ours = contest.rows[0]
        assert (ours.name, ours.status) == ("tileloom", "ok"), contest
        assert ours.median_us > 0
        assert any(row.status == "ok" and row.speedup for row in contest.rows[1:])
