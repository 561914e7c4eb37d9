"""A model in parts on two processes computes what it does as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from tests.fixtures.models import random_model

GROUPED = {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2}
HEADS = {"prediction_heads": True, "reward_attention": True}

PART = """
import sys, torch, torch.distributed as dist
from transformers.distributed import DistributedConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
dist.init_process_group("gloo")
model = LoopWMForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
queries = model.model.core.block[0].attention.q_proj.weight.to_local()
ids, expected = torch.load(sys.argv[2])
with torch.inference_mode():
    logits = model(ids).logits
with open(f"{sys.argv[1]}-{dist.get_rank()}", "w") as file:
    print((logits - expected).abs().max().item(), tuple(queries.shape), file=file)
dist.destroy_process_group()
"""


def test_plan_names_matrices_that_exist_and_leaves_out_no_large_one():
    sizes = PRESETS["tiny"] | GROUPED | HEADS | {"swiglu": True}
    with torch.device("meta"):
        model = LoopWMForCausalLM(LoopWMConfig(vocab_size=3136, **sizes)).model
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    patterns = {
        plan: re.compile(plan.replace(".", r"\.").replace("*", r"\d+")) for plan in model.config.base_model_tp_plan
    }
    assert [plan for plan, pattern in patterns.items() if not any(map(pattern.fullmatch, names))] == []
    whole = {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns.values())}
    heads = {name for name in names if name.startswith("heads.")}
    assert whole - heads == {"core.injection.B", "core.C", "copy.gate"}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [GROUPED | HEADS, {"copy_attention": False, "swiglu": True}])
def test_two_parts_compute_the_logits_of_the_whole(tmp_path: Path, overrides: dict[str, object]) -> None:
    model = random_model(**overrides)
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(9, 3000, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.save((ids, model(ids).logits), tmp_path / "logits.pt")
    (tmp_path / "part.py").write_text(PART)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(tmp_path / "part.py"), str(tmp_path / "model"), str(tmp_path / "logits.pt")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in range(2):
        difference, shape = (tmp_path / f"model-{rank}").read_text().split(maxsplit=1)
        assert float(difference) < 1e-4
        assert shape.strip() == "(32, 64)"  # half of the queries
