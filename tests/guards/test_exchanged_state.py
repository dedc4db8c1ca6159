"""A step that finds another container, object or value where it reads one computes with that.

The programs stand in `programs/exchanged_state.py`. `PARTITA_EXAMPLES` says how many are run.
"""

from __future__ import annotations

import os
import warnings

import pytest

import partita as pt

from ..programs import exchanged_state as programs

SLICES = 4
EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "0")) or 32


def outcome(names):
    try:
        want = programs.run(programs.program_of(*names), lambda step: step)
    except Exception:
        return "no program"
    program = programs.program_of(*names)
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = programs.run(program, lambda step: pt.compile(step, backend="graph"))
        except pt.CaptureError as refusal:
            error = str(refusal)
    if programs.find_fakes([*program.roots, program.step]):
        return "leaves a fake tensor"
    if error:
        return "refused" if error.startswith("capture: ") else error
    return "equal" if programs.same(got, want) else "another result"


@pytest.mark.parametrize("part", range(SLICES))
def test_what_is_exchanged_is_seen_or_refused_and_no_fake_tensor_is_left(part):
    chosen = programs.all_programs()[:EXAMPLES][part::SLICES]
    found = {names: outcome(names) for names in chosen}
    assert {n: o for n, o in found.items() if o not in ("equal", "refused", "no program")} == {}
    outcomes = [*found.values()]
    assert outcomes.count("equal") >= 0.7 * (len(chosen) - outcomes.count("no program"))
