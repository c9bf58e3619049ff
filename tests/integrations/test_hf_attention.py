import os
import subprocess
import sys
from inspect import signature

import pytest
import torch
from tests.integrations.tiny_models import batch, build
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tileloom import masks
from tileloom.errors import OptionError, UnsupportedError
from tileloom.integrations import hf_attention
from tileloom.integrations.hf_attention import attention_forward, register
from tileloom.ops._op import record_choices
from tileloom.ops.attention import attention
from tileloom.ops.attention.reference import attention_reference
from tileloom.testing import assert_accurate

LENGTHS = [11, 7, 2, 11]
# transformers renames the argument between 5.17 and 5.24
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def plain_attention(module, query, key, value, mask, scaling=None, position_bias=None, **kwargs):
    """The formula in the precision of its inputs; eager attention has a float32 softmax in it."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        added = mask if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf)
        scores = scores + added
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2), weights


def written_out_mask(**options):
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**options)


@pytest.fixture
def registered():
    AttentionInterface.register("plain", plain_attention)
    AttentionMaskInterface.register("plain", written_out_mask)
    with register() as registration:
        yield registration
    del AttentionInterface._global_mapping["plain"]
    del AttentionMaskInterface._global_mapping["plain"]


def hidden(model, **inputs):
    with torch.inference_mode():
        out = model(**inputs, output_hidden_states=True)
    states = out.hidden_states if "hidden_states" in out else out.decoder_hidden_states
    return states[-1]


def assert_agrees_with_eager(kind, shown, **inputs):
    """The accuracy rule on whole models: truth by the formula in float64, baseline by eager."""
    truth = hidden(build(kind, "plain", torch.float64), **inputs)[shown]
    baseline = hidden(build(kind, "eager"), **inputs)[shown]
    with record_choices() as choices:
        actual = hidden(build(kind, "tileloom"), **inputs)[shown]
    assert choices, "tileloom did not run"
    assert_accurate(actual, truth, baseline, name=kind)
    return choices


def weight_gradients(model, shown, **inputs):
    """The gradients of all weights in one row, of a fixed mixture of what the tokens come to."""
    states = model(**inputs, output_hidden_states=True)
    states = states.hidden_states if "hidden_states" in states else states.decoder_hidden_states
    mixture = torch.randn(states[-1].shape, generator=torch.Generator().manual_seed(1))
    (states[-1] * mixture)[shown].sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
def test_training_agrees_with_eager(kind):
    ids, mask = batch(LENGTHS, "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    shown = mask.bool()
    if kind == "t5":  # whose position bias is trained as well
        inputs["decoder_input_ids"] = batch([6, 6, 6, 6], "right", seed=1)[0]
        shown = ...
    truth = weight_gradients(build(kind, "plain", torch.float64), shown, **inputs)
    baseline = weight_gradients(build(kind, "eager"), shown, **inputs)
    with record_choices() as choices:
        actual = weight_gradients(build(kind, "tileloom"), shown, **inputs)
    assert "attention_bwd" in {choice.op for choice in choices}
    assert_accurate(actual, truth, baseline, name=kind)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma3", "modernbert"])
def test_padded_batches_agree_with_eager(kind, side):
    ids, mask = batch(LENGTHS, side)
    choices = assert_agrees_with_eager(kind, mask.bool(), input_ids=ids, attention_mask=mask)
    # right padding reaches the operator as lengths, which the Hopper kernel takes; left does not
    problems = [choice.problem for choice in choices]
    assert {p.has_key_lengths for p in problems} == {side == "right"}
    assert {p.has_mask for p in problems} == {side == "left"}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma3"])
def test_a_batch_without_padding_needs_no_mask(kind):
    ids, mask = batch([9, 9], "right")
    everywhere = torch.ones_like(mask, dtype=torch.bool)
    for given in ({}, {"attention_mask": mask}):
        choices = assert_agrees_with_eager(kind, everywhere, input_ids=ids, **given)
        assert not any(c.problem.has_mask or c.problem.has_key_lengths for c in choices)
        assert any(c.problem.band.has_right for c in choices) == (kind != "bert")
        assert any(c.problem.band.has_left for c in choices) == (kind in ("mistral", "gemma3"))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_agree_with_eager(kind):
    ids, mask = batch(LENGTHS, "right")
    answer = batch([6, 6, 6, 6], "right", seed=1)[0]
    choices = assert_agrees_with_eager(
        kind, ..., input_ids=ids, attention_mask=mask, decoder_input_ids=answer
    )
    cross = [c.problem for c in choices if c.problem.len_q != c.problem.len_k]
    assert cross
    assert all(p.has_bias == (kind == "t5") or p in cross for p in (c.problem for c in choices))


@pytest.mark.usefixtures("registered")
def test_a_model_that_makes_no_mask_agrees_with_eager():
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = {}
    for name, implementation, dtype in (
        ("truth", "plain", torch.float64),
        ("baseline", "eager", torch.float32),
        ("actual", "tileloom", torch.float32),
    ):
        with torch.inference_mode():
            model = build("vit", implementation, dtype)
            outputs[name] = model(pixel_values=pixels.to(dtype)).last_hidden_state
    assert_accurate(outputs["actual"], outputs["truth"], outputs["baseline"])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("kind", "side"),
    [("llama", "left"), ("llama", "right"), ("mistral", "left"), ("gemma3", "left")],
)
def test_generation_with_a_cache_gives_the_tokens_of_eager(kind, side, cache):
    ids, mask = batch([9, 4, 7], side)
    tokens, scores = {}, {}
    for implementation in ("eager", "tileloom"):
        out = build(kind, implementation).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens[implementation], scores[implementation] = out.sequences, torch.stack(out.scores)
    assert torch.equal(tokens["tileloom"], tokens["eager"])
    # a tie between tokens would prove nothing: the best leads by much more than rounding
    best = scores["eager"].topk(2, -1).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    assert (scores["tileloom"] - scores["eager"]).abs().max() < 1e-4 * scores["eager"].abs().max()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_prefill_in_chunks_agrees_with_one_pass(kind):
    ids, _ = batch([12, 12], "right")
    whole = hidden(build(kind, "plain", torch.float64), input_ids=ids)
    baseline = hidden(build(kind, "eager"), input_ids=ids)
    model, parts, cache = build(kind, "tileloom"), [], None
    for chunk in ids.split([5, 4, 1, 2], 1):
        with torch.inference_mode():
            out = model(chunk, **{CACHE: cache}, use_cache=True, output_hidden_states=True)
        cache = out[CACHE]
        parts.append(out.hidden_states[-1])
    assert_accurate(torch.cat(parts, 1), whole, baseline, name=kind)


@pytest.mark.usefixtures("registered")
def test_packed_sequences_do_not_see_each_other():
    ids, _ = batch([10], "right")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    choices = assert_agrees_with_eager("llama", ..., **inputs)
    assert all(c.problem.has_mask for c in choices)


@pytest.mark.usefixtures("registered")
def test_packed_sequences_that_no_mask_keeps_apart_are_refused():
    ids, _ = batch([10], "right")
    starts = torch.tensor([0, 4, 7, 10], dtype=torch.int32)
    packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    model = build("llama", "tileloom")
    with pytest.raises(UnsupportedError, match=r"cu_seq_lens_q is of 3 sequences, and the mask is"):
        hidden(model, input_ids=ids, use_cache=False, **packing)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    assert torch.equal(hidden(model, **inputs, **packing), hidden(model, **inputs))
    whole = {"cu_seq_lens_q": starts[::3], "cu_seq_lens_k": starts[::3]}
    assert torch.equal(hidden(model, input_ids=ids, **whole), hidden(model, input_ids=ids))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_the_caller_made_is_used_as_it_is(dtype):
    ids, _ = batch([8, 8], "right")
    visible = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(3)) < 0.6
    visible |= torch.eye(8, dtype=torch.bool)
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    eager = hidden(build("llama", "eager"), input_ids=ids, attention_mask=added)
    given = visible if dtype is torch.bool else added
    with record_choices() as choices:
        actual = hidden(build("llama", "tileloom"), input_ids=ids, attention_mask=given)
    truth = hidden(
        build("llama", "plain", torch.float64), input_ids=ids, attention_mask=added.double()
    )
    assert_accurate(actual, truth, eager)
    assert all(c.problem.has_bias == (dtype is torch.float32) for c in choices)


@pytest.mark.usefixtures("registered")
def test_without_the_mask_function_padding_would_be_seen():
    """Why `register` registers two functions: the reason given in its module's docstring."""
    ids, mask = batch(LENGTHS, "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    eager = hidden(build("bert", "eager"), **inputs)[mask.bool()]
    AttentionInterface.register("attention-only", attention_forward)
    try:
        lost = hidden(build("bert", "attention-only"), **inputs)[mask.bool()]
    finally:
        del AttentionInterface._global_mapping["attention-only"]
    kept = hidden(build("bert", "tileloom"), **inputs)[mask.bool()]
    assert (kept - eager).abs().max() < 1e-5 * eager.abs().max()
    assert (lost - eager).abs().max() > 1e-2 * eager.abs().max()


@pytest.mark.usefixtures("registered")
def test_a_compiled_model_agrees_with_eager():
    ids, mask = batch(LENGTHS, "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    eager = hidden(build("bert", "eager"), **inputs)[mask.bool()]
    with torch.inference_mode():
        compiled = torch.compile(build("bert", "tileloom"), backend="aot_eager", fullgraph=True)
        actual = compiled(**inputs).last_hidden_state[mask.bool()]
    assert (actual - eager).abs().max() < 1e-5 * eager.abs().max()


class Module(torch.nn.Module):
    is_causal = True


def qkv(len_q=5, len_k=5):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 4, len_q, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, len_k, 8, generator=generator)
    return q, k, v


@pytest.mark.parametrize(
    ("causal_module", "kwargs", "mask"),
    [
        (True, {}, masks.causal()),
        (False, {}, None),
        (True, {"is_causal": False}, None),
        (False, {"is_causal": True}, masks.causal()),
        (True, {"sliding_window": 2}, masks.window(1, 0)),
        (True, {"scaling": 0.3}, masks.causal()),
        (True, {"softcap": None, "s_aux": None, "use_cache": True, "dropout": 0.0}, masks.causal()),
    ],
)
def test_options_without_a_mask(causal_module, kwargs, mask):
    q, k, v = qkv()
    module = Module()
    module.is_causal = causal_module
    out, weights = attention_forward(module, q, k, v, None, **kwargs)
    want = attention_reference(q, k, v, mask=mask, scale=kwargs.get("scaling"))
    assert weights is None
    assert out.is_contiguous()
    assert torch.equal(out, want.transpose(1, 2))


def test_a_single_query_sees_the_whole_cache_or_its_window():
    q, k, v = qkv(1, 6)
    out, _ = attention_forward(Module(), q, k, v, None)
    assert torch.equal(out, attention_reference(q, k, v).transpose(1, 2))
    out, _ = attention_forward(Module(), q, k, v, None, sliding_window=3)
    want = attention_reference(q, k[:, :, -3:], v[:, :, -3:]).transpose(1, 2)
    assert (out - want).abs().max() < 1e-6


def test_dropout_is_that_of_attention():
    q, k, v = qkv()
    torch.manual_seed(1)
    out, _ = attention_forward(Module(), q, k, v, None, dropout=0.5)
    torch.manual_seed(1)
    want = attention(q, k, v, is_causal=True, dropout_p=0.5)
    assert torch.equal(out, want.transpose(1, 2))


@pytest.mark.usefixtures("registered")
def test_a_model_in_training_draws_a_new_mask_each_time():
    ids, mask = batch(LENGTHS, "right")
    model = build("bert", "tileloom").train()
    for name, module in model.named_modules():  # the dropouts outside of attention
        if isinstance(module, torch.nn.Dropout) and not name.endswith("self.dropout"):
            module.p = 0.0
    with torch.no_grad():
        first, second = (model(ids, attention_mask=mask).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        first, second = (model(ids, attention_mask=mask).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"softcap": 50.0}, "softcap is 50.0, which asks for a soft cap on the scores"),
        ({"s_aux": torch.zeros(4)}, "s_aux is a Tensor, which asks for attention sinks"),
        ({"temperature": 2.0}, r"temperature \(2.0\) is not known.*ignore=\('temperature',\)"),
        ({"output_attentions": True}, "output_attentions is True"),
        ({"is_causal": False, "sliding_window": 3}, "sliding_window is 3 in attention that is not"),
    ],
)
def test_what_would_be_ignored_is_refused(kwargs, text):
    with pytest.raises(UnsupportedError, match=f"^Module: .*{text}"):
        attention_forward(Module(), *qkv(), None, **kwargs)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.ones(2, 5), r"attention_mask has shape \(2, 5\); it must have the four"),
        (torch.ones(2, 1, 5, 5, dtype=torch.int64), "attention_mask has dtype torch.int64"),
        ({"full_attention": None}, "attention_mask is a dict"),
    ],
)
def test_a_mask_of_another_kind_is_refused(mask, text):
    with pytest.raises(UnsupportedError, match=text):
        attention_forward(Module(), *qkv(), mask)


def test_causal_attention_with_more_keys_than_queries_needs_a_mask():
    with pytest.raises(UnsupportedError, match="causal attention of 3 queries to 7 keys without"):
        attention_forward(Module(), *qkv(3, 7), None)


@pytest.mark.usefixtures("registered")
def test_models_with_unsupported_attention_say_so():
    ids, mask = batch(LENGTHS, "right")
    with pytest.raises(UnsupportedError, match=r"Gemma2Attention: softcap is 50\.0"):
        hidden(build("gemma2", "tileloom"), input_ids=ids, attention_mask=mask)


def test_an_argument_that_changes_nothing_can_be_named():
    with register("named", ignore=["temperature"]):
        forward = AttentionInterface()["named"]
        out, _ = forward(Module(), *qkv(), None, temperature=2.0)
        assert torch.equal(out, attention_forward(Module(), *qkv(), None)[0])


def tables():
    return dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)


def test_removing_restores_what_was_there():
    before = tables()
    registration = register()
    assert "tileloom" in AttentionInterface()
    assert "tileloom" in AttentionMaskInterface()
    registration.remove()
    registration.remove()
    assert tables() == before
    with pytest.raises((KeyError, ValueError), match="tileloom"):
        build("bert", "tileloom")(*batch(LENGTHS, "right"))


def test_a_name_stays_until_its_last_holder_is_gone():
    before = tables()
    outer = register()
    with register() as inner:
        assert inner.name == "tileloom"
        outer.remove()
        outer.remove()
        assert "tileloom" in AttentionInterface()
    assert tables() == before


def test_a_replaced_name_comes_back():
    before = tables()
    with register("sdpa"):
        assert AttentionInterface()["sdpa"] is not before[0]["sdpa"]
    assert tables() == before


def test_a_function_registered_over_ours_stays():
    before = tables()
    registration = register()
    AttentionInterface.register("tileloom", attention_forward)
    registration.remove()
    assert AttentionInterface._global_mapping.pop("tileloom") is attention_forward
    assert tables() == before


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "org/kernel"}, "name is 'org/kernel'.*without '/'"),
        ({"padding": "left"}, "padding is 'left'; it must be one of auto, right, unknown"),
        ({"ignore": 3}, r"ignore is 3; it must be names.*Try: ignore=\('my_argument',\)"),
        ({"ignore": (torch.ones(1),)}, r"ignore is \(.*; it must be names of keyword"),
        ({"ignore": "softcap"}, r"ignore is the text 'softcap'.*Try: ignore=\('softcap',\)"),
    ],
)
def test_wrong_options_are_refused(kwargs, text):
    before = tables()
    with pytest.raises(OptionError, match=text):
        register(**kwargs)
    assert tables() == before


def test_one_name_has_one_set_of_options(registered):
    with pytest.raises(OptionError, match="'tileloom' is registered with padding='auto'"):
        register(padding="right")
    with register("other", padding="right"):
        pass


def test_nothing_is_imported_or_registered_at_import():
    code = (
        "import sys, tileloom.integrations.hf_attention as h\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'transformers']\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_missing_transformers_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"transformers 5 or later.*pip install 'transformers>=5'"
    ):
        hf_attention.register()
