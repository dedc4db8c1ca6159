"""Is each C++ kernel compiled once, in a library with other kernels?"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from partita.graph.backend import cpp_kernels
from partita.graph.backend.cpp_kernels import KernelCompiler

KERNEL = '#include <vector>\nextern "C"  void  kernel(float* x)\n{{ x[0] = {}; }}\n'
LINE = "x[1] = 0;\n" * 3000


@pytest.fixture
def collected(monkeypatch, tmp_path):
    """Gives the kernels of programs to a `KernelCompiler`. Returns the values in each library."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def collect(*programs):
        from torch._inductor.async_compile import AsyncCompile

        made = []
        monkeypatch.setattr(cpp_kernels, "KernelLibrary", lambda kernels: made.append([*kernels]))
        with KernelCompiler() as kernels:
            for values in programs:
                with ExitStack() as stack:
                    names = kernels.collect_kernels(stack)
                    for value in values:
                        AsyncCompile().cpp_pybinding(["float*"], KERNEL.format(value))
            kernels.begin_library()
        assert len(names) == len(programs[-1])
        values = [value for program in programs for value in program]
        of = {cpp_kernels.name_of_kernel(["float*"], KERNEL.format(v)): v for v in values}
        return [[of[name] for name in library] for library in made]

    return collect


def test_a_kernel_that_two_programs_have_is_compiled_once(collected):
    assert collected([1, 2], [2, 3]) == [[1, 2, 3]]


def test_a_library_has_few_kernels_and_little_source(collected):
    assert collected(range(5), range(5, 11)) == [[*range(8)], [8, 9, 10]]
    long = [f"{i}; {LINE}" for i in range(3)]
    assert collected(long) == [long[:2], long[2:]]


@pytest.mark.parametrize("line", ["#define x y", "#if 1", "using namespace std;"])
def test_a_kernel_whose_lines_would_change_others_is_alone_in_its_library(line, collected):
    alone = f"2;\n{line}\n"
    assert collected([1, alone, 3, 4]) == [[1], [alone], [3, 4]]


def test_a_kernel_beside_another_function_is_alone_in_its_library(collected):
    alone = '2; }\nextern "C" void kernel(int* x) {'
    assert collected([1, alone, 3]) == [[1], [alone], [3]]
