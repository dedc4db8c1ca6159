"""How does a rank come to die where a test wants it to? Python runs this file as it starts.

A test puts this folder first on PYTHONPATH and says in DIE which rank is to end, how, in which
phase and of which step: "1 kill backward 5". Saves, which go on beside the steps, are counted by
themselves: "1 kill save 2" is the second. It happens once, though torchrun starts the rank anew:
the file DIED is then there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

RANK, HOW, PHASE, STEP = os.environ["DIE"].split()


def die(*_: object) -> None:
    Path(os.environ["DIED"]).touch()
    if HOW == "raise":
        raise ZeroDivisionError("this rank has had enough")
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK") == RANK and not Path(os.environ["DIED"]).exists():
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from partita.app.models import GPT
    from partita.app.models.decoder import Block
    from partita.checkpoint.dcp_format import Writer

    step, saves = -1, 0
    forward_of_model, forward_of_block, write = GPT.forward, Block.forward, Writer.write_data

    def model(self, *args):
        global step
        step += 1
        return forward_of_model(self, *args)

    def block(self, *args):
        out = forward_of_block(self, *args)
        if PHASE == "forward" and step == int(STEP):
            die()
        if PHASE == "backward" and step == int(STEP):
            out.register_hook(die)
        return out

    def before_optimizer(*_):
        if PHASE == "optimizer" and step == int(STEP):
            die()

    def write_data(self, *args):
        global saves
        saves += 1
        if PHASE == "save" and saves == int(STEP):
            die()
        return write(self, *args)

    GPT.forward, Block.forward, Writer.write_data = model, block, write_data
    register_optimizer_step_pre_hook(before_optimizer)
