import pytest
import torch
from tests.integrations.tiny_models import save_tiny_bert
from tests.report.test_contest import PLAN, Clock

from tileloom.integrations.hf_attention import register
from tileloom.integrations.hf_embedder import Embedder
from tileloom.report import embedding_contests as module


@pytest.fixture
def embedder(tmp_path):
    return Embedder(save_tiny_bert(tmp_path))


def test_the_contests_of_a_model(embedder, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 3)
    texts = [
        "one two three",
        "a text of a few words more",
        "the longest of all of these texts",
        "x",
    ]
    with register():
        contests, trouble = module.embedding_contests(
            embedder, texts, torch.device("cpu"), timer=Clock(), plan=PLAN
        )
    assert trouble == ""
    assert [contest.title for contest in contests] == [
        "One attention call (batch 3, 2 heads of 16, 9 tokens, float16, padded, 5 to 9 each)",
        "One attention call (batch 3, 2 heads of 16, 9 tokens, float16, no padding)",
        "The whole model (3 texts, 9 tokens, float16)",
    ]
    for contest in contests:
        ours = contest.rows[0]
        assert (ours.name, ours.status, ours.note) == ("tileloom", "ok", "by reference"), contest
    status = {row.name: row.status for row in contests[2].rows}
    assert status == {"tileloom": "ok", "PyTorch SDPA": "ok", "eager": "ok"}


def test_trouble_is_told_and_what_was_held_stays(embedder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the device is lost\nand more")

    monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(module, "_whole_passes", fail)
    with register():
        contests, trouble = module.embedding_contests(
            embedder, ["a b c", "d e f g"], torch.device("cpu"), timer=Clock(),
            plan=PLAN,
        )  # fmt: skip
    assert len(contests) == 2
    assert trouble == "The contest after these could not be held: the device is lost"
