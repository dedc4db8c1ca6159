"""Does a run give the losses of one device, however its options are put together?"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import partita as pt
from partita.app import Options, options_in, train
from partita.cli import main

MESH = (("dp", 2), ("tp", 2))


def tell(event: str, **facts: object) -> None:
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Options:
    text = tmp_path_factory.mktemp("text") / "alphabet.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz\n" * 400)
    return Options(
        data=text, steps=6, layers=2, width=32, heads=2, context=32, batch=8, lr=1e-2, sample=0
    )


@pytest.fixture(scope="module")
def truth(tiny: Options) -> list[float]:
    return train(tiny, tell)


def losses_on(options: Options, tell=tell) -> list[float]:
    """The losses on ranks of this process; all ranks have the same."""
    with pt.ranks(**dict(options.mesh)) as world:
        first, *others = world.run(lambda mesh: train(options, tell, mesh=mesh))
    assert all(other == first for other in others)
    return first


def difference(losses: list[float], truth: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True))


# -- options that are put together -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero": 1, "sp": True, "accumulate": 4},
        {"zero": 2, "remat": 1 << 20, "accumulate": 2},
        {"zero": 3, "sp": True, "remat": "blocks", "accumulate": 2},
        {"compile": True},
        {"compile": True, "zero": 3, "sp": True, "remat": "blocks", "accumulate": 2},
    ],
    ids=str,
)
def test_the_losses_are_those_of_one_device_whatever_is_asked_together(options, tiny, truth):
    assert difference(losses_on(replace(tiny, mesh=MESH, **options)), truth) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "compile"), [(0, False), (3, False), (0, True), (3, True)])
def test_in_bf16_all_of_it_together_stays_near_fp32(zero, compile, tiny, truth):
    options = replace(
        tiny,
        mesh=MESH,
        zero=zero,
        sp=True,
        remat="blocks",
        accumulate=2,
        dtype="bf16",
        compile=compile,
    )
    losses = losses_on(options)
    assert 0 < difference(losses, truth) < 1e-2


# -- going on --------------------------------------------------------------------------------------


class PulledPlug(Exception):
    pass


def broken_off(options: Options, at: int) -> None:
    """Run, and end without a warning after the step `at`."""

    def tell(event: str, **facts: object) -> None:
        if event == "step" and facts["step"] == at:
            raise PulledPlug

    with pytest.raises(PulledPlug):
        losses_on(options, tell)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(compile, tiny, tmp_path):
    options = replace(tiny, mesh=MESH, zero=3, sp=True, accumulate=2, compile=compile)
    whole = losses_on(options)
    kept = replace(options, save=tmp_path / "run", save_every=2, resume=True)
    broken_off(kept, at=4)
    rest = losses_on(kept)
    assert 2 <= len(rest) <= 4 and rest == whole[-len(rest) :]
    assert losses_on(kept) == []  # it is finished, and its last checkpoint is that of the end


@pytest.mark.slow
def test_a_run_goes_on_upon_another_mesh_with_another_stage(tiny, truth, tmp_path):
    kept = replace(tiny, save=tmp_path / "run", save_every=2, resume=True)
    broken_off(replace(kept, mesh=MESH, zero=3), at=3)
    rest = losses_on(replace(kept, mesh=(("dp", 3),), zero=1))
    assert rest and difference(rest, truth[-len(rest) :]) < 1e-5


def test_a_run_does_not_go_on_as_another_model_or_with_other_batches(tiny, tmp_path):
    kept = replace(tiny, steps=1, save=tmp_path / "run", resume=True)
    train(kept, tell)
    for other in ({"width": 64}, {"seed": 1}, {"batch": 4}):
        ((name, now),) = other.items()
        with pytest.raises(ValueError, match=f"--{name} {getattr(tiny, name)}.*{now}"):
            train(replace(kept, **other), tell)


def test_a_checkpoint_is_not_written_over_unless_the_run_goes_on_from_it(tiny, tmp_path):
    kept = replace(tiny, steps=1, save=tmp_path / "run")
    train(kept, tell)
    with pytest.raises(ValueError, match="holds a checkpoint already; --resume"):
        kept.check()
    replace(kept, resume=True).check()


# -- a loss that is no number ----------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tiny, tmp_path):
    bad = replace(tiny, lr=1e30, save=tmp_path / "run", save_every=1)
    with pytest.raises(ValueError, match="the loss of step 1 is nan; --detect-nan"):
        train(bad, tell)
    with pytest.raises(pt.NanError, match=r"the loss of step 1 is nan\n.*blocks\.0\.norm1"):
        train(replace(bad, save=None, detect_nan=True), tell)


# -- options as flags and as files -----------------------------------------------------------------

OTHERS = {
    "mesh": MESH,
    "remat": 3 << 20,
    "dtype": "bf16",
    "zero": 3,
    "lr": 1e-4,
    "device": "cpu",
}


def _find_other_value(option):
    """One that the option does not have by default, of its own kind."""
    if option.name in OTHERS:
        return OTHERS[option.name]
    if option.default is None:  # any text is a value: a path, or a name
        return option.metadata["read"]("another one")
    return not option.default if isinstance(option.default, bool) else option.default + 7


@pytest.mark.parametrize("option", fields(Options), ids=lambda option: option.name)
def test_what_print_config_prints_config_reads_back(option, tmp_path, capsys):
    options = Options(**{option.name: _find_other_value(option)})
    assert Options(**options_in(options.to_toml())) == options != Options()
    file = tmp_path / "options.toml"
    file.write_text(options.to_toml())
    printed = []
    for _ in range(2):
        main(["train", "--config", str(file), "--print-config"])
        printed.append(capsys.readouterr().out)
        file.write_text(printed[-1])
    assert printed[0] == printed[1]
    assert Options(**options_in(printed[0])) == options


def test_flags_come_before_the_file(tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text('mesh = "dp=4,tp=2"\nzero = 3\nsteps = 7\nsp = true\n')
    main(["train", "--config", str(file), "--steps", "9", "--no-sp", "--tp", "4", "--print-config"])
    options = Options(**options_in(capsys.readouterr().out))
    assert options == Options(mesh=(("dp", 2), ("tp", 4)), zero=3, steps=9)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("setps = 3", "there is no option setps; there is steps"),
        ("steps = 0", "steps: 0 is not a positive number"),
        ("sp = 1", "sp = 1: takes true or false"),
        ('remat = "some"', "'some' is neither none nor blocks nor a budget"),
        ("zero = 4", "zero: '4' is not one of 0, 1, 2, 3"),
        ("lr = nan", "lr: nan is not a positive number"),
        ("lr = -1.0", "lr: -1.0 is not a positive number"),
        ("steps =", "Invalid value"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_name(toml, said, tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text(toml)
    assert main(["train", "--config", str(file)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "options.toml" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--zero 3 --tp 4", "--zero 3 shards over dp, and --mesh tp=4 has none"),
        ("--sp --mesh dp=2", "--sp splits the sequence over tp, and --mesh dp=2 has none"),
        ("--accumulate 3", "--batch 16 does not divide into --accumulate 3"),
        ("--compile --detect-nan", "--detect-nan checks modules"),
        ("--resume", "--resume goes on from the checkpoint in --save DIR"),
        ("--tp 3", "--tp 3 does not divide 4 ranks"),
        ("--mesh dp=2,tp=2 --tp 4", "--mesh dp=2,tp=2 contradicts --tp 4"),
        ("--verify --dtype bf16", "--verify compares losses in fp32"),
        ("--config /nowhere.toml", "/nowhere.toml"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments, said, capsys):
    assert main(["train", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


def test_on_one_rank_the_options_of_many_run_and_say_what_has_no_effect(tiny):
    of_many = replace(tiny, steps=2, zero=3, sp=True, dtype="bf16")
    of_many.check()
    used, lines = of_many.leave_out_idle()
    assert (used.zero, used.sp) == (0, False) and used.dtype == "bf16"
    assert [line.partition(" has no effect on one rank")[0] for line in lines] == [
        "--zero 3",
        "--sp",
    ]
    for dtype in ("fp32", "bf16"):
        same = replace(of_many, dtype=dtype)
        assert train(same, tell) == train(replace(same, zero=0, sp=False), tell)


@pytest.mark.parametrize(
    ("gpus", "options", "mesh"),
    [(0, "", "dp=2,tp=2"), (1, "--zero 3", ""), (2, "", "dp=2"), (1, "--device cpu", "dp=2,tp=2")],
)
def test_it_starts_a_rank_for_each_gpu_or_four(gpus, options, mesh, monkeypatch, capsys):
    monkeypatch.setattr("partita.cli.accelerator_names", lambda: ["a GPU"] * gpus)
    assert main(["train", *options.split(), "--print-config"]) == 0
    assert f'mesh = "{mesh}"' in capsys.readouterr().out


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"partita {pt.__version__}"


def test_a_bench_tells_its_own_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "memory", "--help"])
    assert ended.value.code == 0 and "--width" in capsys.readouterr().out
