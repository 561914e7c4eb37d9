from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from loopwm.records.errors import InputError
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer

TOKENS = torch.randint(9, len(load_tokenizer()), (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path, max_shard_size="1MB")
    tokenizer.save_pretrained(path)
    return path


def test_all_files_of_a_folder_are_readable_alike(folder):
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    assert list(folder.glob("*.safetensors"))


@torch.no_grad()
def test_cached_equals_uncached_token_by_token(model):
    whole = model(TOKENS, depth=3).logits
    cache = DynamicCache(config=model.config)
    parts = [model(TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True, depth=3).logits for i in range(24)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_padded_batch_equals_single(model):
    short = TOKENS[1:, 10:]
    padded = torch.cat((torch.zeros(1, 10, dtype=torch.long), short), dim=1)
    batch = torch.cat((TOKENS[:1], padded))
    mask = torch.ones_like(batch)
    mask[1, :10] = 0
    logits = model(batch, attention_mask=mask).logits
    torch.testing.assert_close(logits[1, 10:], model(short).logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0], model(TOKENS[:1]).logits[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_eager_and_sdpa_agree(model):
    expected = model(TOKENS).logits
    model.set_attn_implementation("eager")
    try:
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    finally:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def test_saved_checkpoint_loads_identically_by_class_and_auto_classes(model, folder):
    expected = model(TOKENS, depth=3).logits
    loaded, _ = load_checkpoint(folder)
    assert torch.equal(loaded(TOKENS, depth=3).logits, expected)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == model.config.core.num_slots
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(TOKENS, depth=3).logits, expected)
    hidden = AutoModel.from_pretrained(folder)(TOKENS, depth=3).last_hidden_state
    torch.testing.assert_close(hidden @ model.lm_head.weight.T, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_auto_classes_find_the_model_without_importing_the_package_first(folder, tmp_path):
    code = (
        "import sys; from transformers import AutoModelForCausalLM\n"
        "assert not any(name.startswith('loopwm') for name in sys.modules)\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "print(type(model).__name__)"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "LoopWMForCausalLM"


def test_without_copy_attention_the_model_runs_and_differs(model):
    from tests.fixtures.models import random_model

    plain = random_model(copy_attention=False)
    assert sum(p.numel() for p in plain.parameters()) < sum(p.numel() for p in model.parameters())
    assert (plain(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-2


def test_copied_embeddings_reach_the_logits_of_the_copied_token():
    """With the gate open and sharp queries, the token attended to gains the most."""
    model = LoopWMForCausalLM(LoopWMConfig(vocab_size=64, **PRESETS["tiny"]))
    with torch.no_grad():
        model.model.copy.gate.bias.fill_(20.0)
        model.model.copy.scale.fill_(1e3)
        logits = model(torch.full((1, 5), 7)).logits
    assert (logits.argmax(-1) == 7).all()


def test_fresh_layers_are_the_identity_and_injection_starts_as_parcae():
    model = LoopWMForCausalLM(LoopWMConfig(vocab_size=64, **PRESETS["tiny"]))
    core = model.model.core
    torch.testing.assert_close(core.injection.retention(), torch.full((64,), 0.2**0.5))
    assert torch.equal(core.injection.B.weight, torch.eye(64))
    assert torch.equal(core.C.weight, torch.eye(64))
    for layer in (*core.prelude, *core.block, *core.coda):
        assert not layer.attention.o_proj.weight.any()
        assert not layer.mlp.down_proj.weight.any()


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [("tiny", 0.1, 1), ("small", 9, 12), ("base", 25, 33), ("large", 150, 170), ("1b", 950, 1050)],
)
def test_presets_have_the_sizes_they_promise(preset, low, high):
    with torch.device("meta"):
        model = LoopWMForCausalLM(LoopWMConfig(**PRESETS[preset]))
    assert low <= sum(p.numel() for p in model.parameters()) / 1e6 <= high


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_dim": 48},
        {"default_depth": 0},
        {"default_depth": 99},
        {"state_slots": 0},
        {"block_layers": 0},
    ],
)
def test_impossible_configurations_are_refused_by_name(wrong):
    with pytest.raises(Exception, match=next(iter(wrong))):
        LoopWMConfig(**{**PRESETS["tiny"], **wrong})


def test_config_updated_to_fewer_loops_has_their_slots():
    config = LoopWMConfig(**PRESETS["reference"])
    config.update({"default_depth": 2, "max_loops": 2})
    assert (config.default_depth, config.num_hidden_layers) == (2, 5 + 2 * 4)
    assert len(LoopWMForCausalLM(config).model.slots) == 13


def test_config_of_fixed_depth_has_slots_for_its_loops_only(monkeypatch):
    monkeypatch.setattr(LoopWMConfig, "depth_is_fixed", True)
    config = LoopWMConfig(**PRESETS["reference"] | {"default_depth": 2, "max_loops": 6})
    assert (config.max_loops, config.num_hidden_layers) == (6, 5 + 2 * 4)
    config.update({"default_depth": 3})
    assert len(LoopWMForCausalLM(config).model.slots) == 5 + 3 * 4


@pytest.mark.parametrize("name", ["carry_state", "zoh"])
def test_config_with_retired_switch_loads_only_at_its_default(folder, tmp_path, name):
    target = damaged(folder, tmp_path / "checkpoint", lambda t: edit_config(t, **{name: False}))
    assert name not in load_checkpoint(target)[0].config.to_dict()
    edit_config(target, **{name: True})
    with pytest.raises(InputError, match=f"{name}: must be False, got True") as error:
        load_checkpoint(target)
    assert "\n" not in str(error.value)


def damaged(folder, target, change):
    shutil.copytree(folder, target)
    change(target)
    return target


def edit_config(target, **changes):
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: (t / "config.json").unlink(), "config.json"),
        (lambda t: (t / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda t: edit_config(t, intermediate_size=128), "mlp"),
        (lambda t: edit_config(t, coda_layers=2), "coda.1"),
        (lambda t: edit_config(t, block_layers="many"), "block_layers"),
        (lambda t: [f.write_bytes(b"x" * 64) for f in t.glob("*.safetensors")], "checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_match_is_refused_in_one_line(folder, tmp_path, change, named):
    with pytest.raises(InputError) as error:
        load_checkpoint(damaged(folder, tmp_path / "checkpoint", change))
    assert named in str(error.value)
    assert "\n" not in str(error.value)
