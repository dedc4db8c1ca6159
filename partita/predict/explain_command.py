"""`partita explain`: the plan of a call that is said on the command line."""

from __future__ import annotations

import argparse
import sys

from partita.comm import dry_mesh
from partita.layout import LayoutError

from .call_text import describe_raised, read_call, read_mesh
from .explain import explain

__all__ = ["add_explain", "run_explain"]


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the options of `partita explain`."""
    parser.description = (
        "Show how a call on DTensors is run: its rule, the ways that were priced, what moves. "
        "Nothing is computed and nothing sent."
    )
    parser.add_argument(
        "call", help='"F.linear(f32[8@dp, 16], f32[32@tp, 16])", "torch.sum", "my_module:function"'
    )
    parser.add_argument("--mesh", required=True, help="the ranks of each axis: dp=2,tp=4")
    parser.add_argument("--args", default="", help="the arguments, where CALL has none")
    parser.add_argument("--rank", type=int, default=0, help="which rank to be (0)")


def run_explain(options: argparse.Namespace) -> int:
    """Print the explanation; the exit code is 2 where the call cannot be read or made."""
    try:
        mesh = dry_mesh(options.rank, **read_mesh(options.mesh))  # type: ignore[arg-type]
        fn, args, kwargs = read_call(options.call, options.args, mesh)
        print(explain(fn, *args, **kwargs))
    except KeyboardInterrupt:
        raise
    except LayoutError as error:  # all its lines count: place, reason and fixes
        print(f"partita explain: {error}", file=sys.stderr)
        return 2
    except BaseException as error:  # the function may raise, and end, as it likes
        name, _, _ = options.call.partition("(")
        said = describe_raised(name.strip(), error, is_user_s=":" in name)
        print(f"partita explain: {said}", file=sys.stderr)
        return 2
    return 0
