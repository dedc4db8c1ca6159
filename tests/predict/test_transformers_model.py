"""Are models of transformers priced and planned by their configuration as they run?"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import partita as pt
from partita.cli import main
from partita.predict import StrategyError, shape_of_config
from partita.predict.strategy import Way, make_step

transformers = pytest.importorskip("transformers")
way_search = importlib.import_module("partita.predict.autoplan")
simulations = importlib.import_module("partita.predict.simulate")
graph_program = importlib.import_module("partita.graph.program")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 48}
TEXT = {**WIDE, "vocab_size": 96, "max_position_embeddings": 64}
CONFIGS = {
    "dense": lambda: transformers.LlamaConfig(**TEXT, num_key_value_heads=4),
    "grouped heads": lambda: transformers.Qwen2Config(**TEXT, num_key_value_heads=2),
    "experts": lambda: transformers.MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=4
    ),
    "tied": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64
    ),
    "vision": lambda: transformers.ViTConfig(**WIDE, image_size=32, patch_size=8, num_labels=10),
}


def shape_of(name: str, **options):
    config = CONFIGS[name]()
    if name == "tied":
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    task = "image-classification" if name == "vision" else "causal-lm"
    return shape_of_config(config, task, **options)


def measure_peak(mesh, shape, strategy) -> int:
    """Bytes at the peak of a captured step on a mesh."""
    torch.manual_seed(0)
    step, args, _ = make_step(shape, {"dp": 2}, strategy, on=mesh)
    compiled = pt.compile(step, backend="graph")
    losses = [float(compiled(*args).full_tensor()) for _ in range(3)]
    assert losses[2] < losses[0]  # it trains
    return compiled.memory.total_peak


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_is_that_of_the_step_that_runs(name):
    shape = shape_of(name)
    strategy = pt.Strategy(precision="float32", batch=2, remat=False, layers=1)
    found = pt.simulate(shape, {"dp": 2}, strategy=strategy)
    with pt.ranks(dp=2) as world:
        for peak in world.run(measure_peak, shape, strategy):
            assert abs(found.peak - peak) <= 0.01 * peak


# Of experts in float32 torch's fakes know no product.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "experts"])
def test_the_bounds_of_a_plan_count_the_state_of_the_optimizer(name):
    shape, way = shape_of(name), Way(1, 1, pt.Strategy(zero=0, layers=1, remat=False))
    with torch.device("meta"):
        weights = sum(p.nbytes for p in shape.make(1, shape.context).parameters())
    assert way_search.least_bytes(shape, way) > 2.5 * weights
    assert way_search.guess_bytes(shape, way) > way_search.least_bytes(shape, way)


@pytest.mark.slow
def test_transformers_own_plan_is_that_of_tensor_parallelism():
    shape = shape_of("grouped heads")
    assert shape.plan(sequence=False)["model.model.layers.*.self_attn.q_proj.bias"] == {
        "tp": pt.Shard(0)
    }
    whole = pt.Strategy(precision="float32", layers=1)
    found = pt.simulate(shape, {"dp": 2, "tp": 2}, strategy=whole)
    assert found.peak < pt.simulate(shape, {"dp": 2}, strategy=pt.Strategy(layers=1)).peak * 2
    sent = [e for e in found.events if e.stream == "tp" and e.phase == "forward"]
    size = 64 * 32 * 4  # bytes of a result of a block
    # The results of the embedding and of the block's two row-parallel layers are summed.
    assert [e.kind for e in sent if e.nbytes >= size] == 3 * ["all_reduce"]
    with pytest.raises(StrategyError, match="tp=4 does not divide the 2 key and value heads"):
        pt.simulate(shape, {"tp": 4})
    with pytest.raises(StrategyError, match="tp=2 does not divide the 1 heads"):  # it has no plan
        pt.simulate(shape_of("tied"), {"tp": 2})


@pytest.mark.slow
def test_adapters_hold_no_state_for_frozen_weights():
    whole, adapted = shape_of("dense"), shape_of("dense", lora=2)
    strategy = pt.Strategy(precision="float32", layers=1)
    one, other = (pt.simulate(s, {"dp": 2}, strategy=strategy).classes for s in (whole, adapted))
    assert other["optimizer"] < one["optimizer"] / 4
    assert other["weights"] >= one["weights"]


@pytest.mark.slow
def test_micro_batches_whose_reductions_wait_for_each_other_are_priced():
    """Of long sequences tp reduces weights' gradients that dp has reduced."""
    sizes = {**TEXT, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 2048}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 4096}
    shape = shape_of_config(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    strategy = pt.Strategy(zero=2, micro_batches=2, remat=False, layers=1)
    found = pt.simulate(shape, {"dp": 4, "tp": 2}, strategy=strategy)
    assert found.nbytes["dp"] > 0
    assert found.nbytes["tp"] > 0


@pytest.mark.slow
def test_a_plan_is_found_within_the_memory():
    found = pt.autoplan(shape_of("dense"), 4, "1GB", most=1)
    assert found.best.peak < 1e9
    assert "shape.make(2, 64)" in found.code


DEEP = {
    "dense": {"zero": 3},
    "grouped heads": {"zero": 2, "remat": False, "micro_batches": 2},
    "experts": {"zero": 1, "remat": False},
    "tied": {"zero": 0, "micro_batches": 2},
    "vision": {"zero": 3, "remat": False},
}


@pytest.mark.slow  # it captures nine blocks, to compare with
@pytest.mark.parametrize("name", DEEP)
def test_a_deep_model_costs_what_a_capture_of_all_its_blocks_says(name, monkeypatch):
    monkeypatch.setattr(graph_program, "OUTLINED_ABOVE", 0)  # a small graph has blocks, too
    shape, strategy, machine = shape_of(name), pt.Strategy(layers=9, **DEEP[name]), "h100"
    deep = pt.simulate(shape, {"dp": 2}, machine, strategy=strategy)
    monkeypatch.setattr(simulations, "repeat_block", lambda *given: pytest.fail("not whole"))
    monkeypatch.setattr(simulations, "are_blocks_alike", lambda *given: False)
    whole = pt.simulate(shape, {"dp": 2}, machine, strategy=strategy)
    assert [b.nbytes for b in deep.holders] == [b.nbytes for b in whole.holders]
    assert replace(deep, holders=()) == replace(whole, holders=())  # which name other nodes


def test_blocks_that_differ_are_all_captured():
    shape = shape_of("grouped heads")
    assert simulations.are_blocks_alike(shape, 9, pt.Strategy())
    config = CONFIGS["grouped heads"]()
    config.layer_types = ["full_attention", "sliding_attention"] * 5
    assert not simulations.are_blocks_alike(shape_of_config(config), 9, pt.Strategy())


@pytest.mark.slow
def test_the_command_reads_a_folder(tmp_path, capsys):
    CONFIGS["dense"]().save_pretrained(tmp_path)

    def run(*options: str) -> int:
        return main(["simulate", "--mesh", "dp=2", *options])

    assert run("--hf", str(tmp_path), "--batch", "4", "--layers", "1") == 0
    title = "llama (weights in float32: the configuration names no dtype) on dp=2"
    assert capsys.readouterr().out.startswith(title)
    assert run("--hf", str(tmp_path / "none")) == 2
    assert "is not a file" in capsys.readouterr().err
    assert run("--model", "gpt", "--lora", "2") == 2


def test_the_name_says_the_dtype_of_the_weights():
    config = CONFIGS["dense"]()
    config.dtype = torch.bfloat16
    name = "llama with LoRA of rank 2 (weights in bfloat16: the configuration's dtype)"
    assert shape_of_config(config, lora=2).name == name
    step, _, _ = make_step(shape_of_config(config), {"dp": 2}, pt.Strategy())
    assert step.__qualname__.startswith("the step of llama (weights in bfloat16")


@pytest.mark.slow
def test_what_is_no_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StrategyError, match="is not a configuration of transformers"):
        shape_of_config(tmp_path)
    with pytest.raises(StrategyError, match="task is 'chat'"):
        shape_of_config(CONFIGS["dense"](), "chat")
    with pytest.raises(StrategyError, match="vit is no model for causal-lm"):
        shape_of_config(CONFIGS["vision"]())
